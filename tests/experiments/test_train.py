"""Tests that a killed and resumed run ends with the bits of an undisturbed run."""

import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import tyro
from rich.console import Console

from experiments import logs
from experiments import train as experiment

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 60
FLAGS = [
    *("--cpu-devices", "2", "--steps", str(STEPS), "--checkpoint-every", "10"),
    *("--log-every", "5", "--test-every", "20", "--dropout", "0.1", "--width", "3"),
    *("--warmup-steps", "15"),
]


def command(out, *flags):
    return [sys.executable, "-m", "experiments.train", *FLAGS, "--out", out, *flags]


def train(out, *flags):
    done = subprocess.run(
        command(out, *flags), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def result(out):
    return json.loads((out / "result.json").read_text())


def learned(out):
    """Returns the log without its only column of times."""
    rows = [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "steps_per_second"} for row in rows]


def train_here(out, *flags):
    """Does what `train` does, in this process and on the first two of its devices."""
    flags = [*FLAGS[2:], "--devices", "2", "--out", str(out), *flags]
    console = Console(file=io.StringIO(), width=200)
    experiment.run(tyro.cli(experiment.Config, args=flags), console)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    out.rmdir()
    train_here(out)
    return out


@pytest.mark.full
def test_finished_run_leaves_its_records(undisturbed):
    names = {path.name for path in undisturbed.iterdir()}
    assert {"config.json", "metrics.jsonl", "curves.png", "result.json"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    record = result(undisturbed)
    assert record["test_accuracy"] > 0.8
    assert set(record["collectives"]) == {"all-reduce"}
    assert {"command", "commit", "versions", "seed", "device"} <= record.keys()


def terminate(monkeypatch, step):
    """Sends SIGTERM to this process when the log reaches a step."""

    def write(log, now, row):
        before(log, now, row)
        if now == step:
            os.kill(os.getpid(), signal.SIGTERM)

    before = logs.Log.write
    monkeypatch.setattr(logs.Log, "write", write)


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be disturbed"
        assert time.monotonic() < deadline
        time.sleep(0.001)


def interrupt(out, condition, signum):
    """Starts or resumes a run, and signals it once `condition` holds."""
    flags = ["--resume"] if out.exists() else []
    process = subprocess.Popen(
        command(out, *flags), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_for(condition, process)
    process.send_signal(signum)
    process.communicate(timeout=60)
    return process.returncode


def logged(out, step):
    """Returns a condition: the log has reached `step`."""
    path = out / "metrics.jsonl"
    return lambda: path.exists() and f'"step": {step},' in path.read_text()


def saving(out, step):
    """Returns a condition: checkpoint `step` is being written at this moment."""
    folder = out / "checkpoints"
    return lambda: any(
        name.startswith(f"{step}.orbax-checkpoint-tmp")
        for name in (os.listdir(folder) if folder.exists() else ())
    )


def latest_step(out):
    """Returns the step of the latest checkpoint of a run."""
    names = (path.name for path in (out / "checkpoints").iterdir())
    return max(int(name) for name in names if name.isdigit())


@pytest.mark.full
def test_run_killed_during_a_save_ends_with_the_same_bits(undisturbed, tmp_path):
    out = tmp_path / "killed"
    assert interrupt(out, saving(out, 20), signal.SIGKILL) == -signal.SIGKILL
    assert not (out / "result.json").exists()
    train_here(out, "--resume")
    assert_same(out, undisturbed)


@pytest.mark.full
def test_run_killed_anywhere_ends_with_the_same_bits(tmp_path):
    """Kills a run before any checkpoint, between two, and twice during a save."""
    out, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    train(undisturbed)
    kills = [logged(out, 5), saving(out, 20), logged(out, 45), saving(out, STEPS)]
    for condition in kills:
        assert interrupt(out, condition, signal.SIGKILL) == -signal.SIGKILL
        assert not (out / "result.json").exists()
    train(out, "--resume")
    assert_same(out, undisturbed)


def assert_same(out, undisturbed):
    assert result(out)["params_digest"] == result(undisturbed)["params_digest"]
    assert result(out)["test_accuracy"] == result(undisturbed)["test_accuracy"]
    assert learned(out) == learned(undisturbed)


@pytest.mark.full
def test_sigterm_in_process_saves_and_exits(undisturbed, tmp_path, monkeypatch):
    out = tmp_path / "terminated"
    terminate(monkeypatch, 25)
    assert "stopped by SIGTERM, saved at step 25" in train_here(out)
    assert latest_step(out) == 25
    monkeypatch.undo()
    assert "resumed at step 25" in train_here(out, "--resume")
    assert result(out)["params_digest"] == result(undisturbed)["params_digest"]


@pytest.mark.full
def test_sigterm_to_the_command_saves_and_exits(undisturbed, tmp_path):
    out = tmp_path / "terminated"
    assert interrupt(out, logged(out, 25), signal.SIGTERM) == 0
    saved = latest_step(out)
    assert saved >= 25
    assert f"resumed at step {saved}" in train(out, "--resume")
    assert result(out)["params_digest"] == result(undisturbed)["params_digest"]


@pytest.mark.full
def test_other_device_count_in_process_drains_with_a_message(tmp_path, monkeypatch):
    out = tmp_path / "fewer"
    terminate(monkeypatch, 20)
    train_here(out)
    monkeypatch.undo()
    printed = train_here(out, "--resume", "--devices", "1")
    assert "gradients in flight were applied" in printed
    assert result(out)["steps"] == STEPS


@pytest.mark.full
def test_other_device_count_in_the_command_drains_with_a_message(tmp_path):
    out = tmp_path / "fewer"
    assert interrupt(out, logged(out, 20), signal.SIGTERM) == 0
    printed = train(out, "--resume", "--devices", "1")
    assert "gradients in flight were applied" in printed
    assert result(out)["steps"] == STEPS


REFUSED = [
    ([], "`out` must be a new folder"),
    (["--resume", "--learning-rate", "0.5"], "`resume` must keep the run's settings"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_folder_of_another_run_is_refused_in_process(undisturbed, flags, message):
    with pytest.raises((FileExistsError, ValueError), match=message):
        train_here(undisturbed, *flags)


@pytest.mark.full
@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_folder_of_another_run_is_refused_by_the_command(undisturbed, flags, message):
    done = subprocess.run(
        command(undisturbed, *flags),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert message in done.stderr
