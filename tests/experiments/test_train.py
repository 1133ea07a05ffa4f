"""A run killed, terminated and resumed ends with the bits of one left alone."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

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
    """The log without the one column that is a time."""
    rows = [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "steps_per_second"} for row in rows]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    out.rmdir()
    train(out)
    return out


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be disturbed"
        assert time.monotonic() < deadline
        time.sleep(0.001)


def interrupt(out, condition, signum):
    """Starts a run, or goes on with one, and signals it once `condition` holds."""
    flags = ["--resume"] if out.exists() else []
    process = subprocess.Popen(
        command(out, *flags), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_for(condition, process)
    process.send_signal(signum)
    process.communicate(timeout=60)
    return process.returncode


def logged(out, step):
    """Whether the log has reached `step`."""
    path = out / "metrics.jsonl"
    return lambda: path.exists() and f'"step": {step},' in path.read_text()


def saving(out, step):
    """Whether checkpoint `step` is being written at this moment."""
    folder = out / "checkpoints"
    return lambda: any(
        name.startswith(f"{step}.orbax-checkpoint-tmp")
        for name in (os.listdir(folder) if folder.exists() else ())
    )


def test_killed_anywhere_ends_with_the_same_bits(undisturbed, tmp_path):
    """Before any checkpoint, between two, twice while one is being written."""
    out = tmp_path / "killed"
    kills = [logged(out, 5), saving(out, 20), logged(out, 45), saving(out, STEPS)]
    for condition in kills:
        assert interrupt(out, condition, signal.SIGKILL) == -signal.SIGKILL
        assert not (out / "result.json").exists()
    train(out, "--resume")
    assert result(out)["params_digest"] == result(undisturbed)["params_digest"]
    assert result(out)["test_accuracy"] == result(undisturbed)["test_accuracy"]
    assert learned(out) == learned(undisturbed)


def test_sigterm_saves_and_exits(undisturbed, tmp_path):
    out = tmp_path / "terminated"
    assert interrupt(out, logged(out, 25), signal.SIGTERM) == 0
    saved = max(int(p.name) for p in (out / "checkpoints").iterdir())
    assert saved >= 25
    assert f"resumed at step {saved}" in train(out, "--resume")
    assert result(out)["params_digest"] == result(undisturbed)["params_digest"]


def test_other_device_count_is_drained_and_said(tmp_path):
    out = tmp_path / "fewer"
    assert interrupt(out, logged(out, 20), signal.SIGTERM) == 0
    printed = train(out, "--resume", "--devices", "1")
    assert "gradients in flight were applied" in printed
    assert result(out)["steps"] == STEPS


def test_folder_of_another_run_is_refused(undisturbed):
    other = ["--resume", "--learning-rate", "0.5"]
    for flags, message in (
        ([], "`out` must be a new folder"),
        (other, "`resume` must keep the run's settings"),
    ):
        done = subprocess.run(
            command(undisturbed, *flags),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0
        assert message in done.stderr


def test_a_run_leaves_its_records(undisturbed):
    names = {path.name for path in undisturbed.iterdir()}
    assert {"config.json", "metrics.jsonl", "curves.png", "result.json"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    record = result(undisturbed)
    assert record["test_accuracy"] > 0.8
    assert record["collectives"] == ["all-reduce"]
    assert {"command", "commit", "versions", "seed", "device"} <= record.keys()
