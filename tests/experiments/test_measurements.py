"""Tests that each experiment runs from its command line and writes its results."""

import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from experiments import checkpoint_cost, codec_speed, logs, overhead
from experiments.convex import _codecs, _picture, _regret

from . import here

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"


def experiment(name, *flags, cwd=ROOT):
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.{name}", *flags],
        cwd=cwd,
        env=None,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(params=["here", pytest.param("alone", marks=pytest.mark.full)])
def where(request):
    """Says whether the experiment runs in this process or in a process of its own."""
    return request.param


@pytest.fixture
def run(where, monkeypatch):
    """Runs an experiment from its command line, and returns what it prints."""
    if where == "here":
        return functools.partial(here.run, monkeypatch)
    return experiment


@pytest.mark.full
def test_overhead_experiment_writes_ratios_and_verdicts(tmp_path, run):
    out = tmp_path / "overhead.json"
    size = ("--models", "mlp", "--batch-sizes", "64", "--rounds", "3")
    run("overhead", *size, "--seconds", "0.01", "--calls", "3", "--out", str(out))
    record = json.loads(out.read_text())
    assert record["python_microseconds"].keys() == overhead.STEPS.keys()
    (rows,) = record["models"].values()
    assert rows["by hand"]["ratio"]["median"] == 1
    assert {"width 1", "width 2, predicted", "by hand, skipping"} < rows.keys()
    for name in overhead.STEPS:
        twin = overhead.TWINS[name]
        assert rows[name]["twin"] == rows[f"{name}, program"]["twin"] == twin
        short = rows[f"{name}, program"]["ratio"]["median"]
        assert rows[name]["judged"] in (short, rows[name]["ratio"]["median"])
        assert rows[name]["met"] == (rows[name]["judged"] <= overhead.BAR)


@pytest.mark.full
def test_convex_experiment_writes_result_and_plots(tmp_path, where, run, monkeypatch):
    out, plot = tmp_path / "convex.json", tmp_path / "convex.png"
    widths, log2_steps = ("1", "2", "4"), "11"
    if where == "here":
        log2_steps = "10"
        one = {"top 10 %": _codecs.CODECS["top 10 %"]}
        monkeypatch.setattr(_codecs, "CODECS", one)
        games = _regret.games()
        few = {name: games[name] for name in (*ADVERSARIES, "absolute loss")}
        monkeypatch.setattr(_regret, "games", lambda: few)
        coarse = functools.partial(_picture.picture, widths=(2,))
        monkeypatch.setattr(_picture, "picture", coarse)
        monkeypatch.setattr(_picture, "_MOMENTA", np.array([0.0, 0.5, 0.9]))
    size = ("--widths", *widths, "--log2-steps", log2_steps, "--seeds", "0")
    stable = tmp_path / "stability.png"
    files = ("--out", str(out), "--plot", str(plot), "--stability-plot", str(stable))
    printed = run("convex", *size, "--data", "digits", *files)
    assert "adversary, lines" in printed
    record = json.loads(out.read_text())
    assert record["command"].startswith("python -m experiments.convex --widths")
    assert record["softmax"]["digits"].keys() == set(widths)
    assert plot.stat().st_size > 10_000
    assert stable.stat().st_size > 10_000


ADVERSARIES = ("adversary, lines", "adversary, parabolas")


@pytest.mark.full  # in the quick run, test_convergence.py has a small one
def test_convergence_experiment_writes_result_and_plot(tmp_path):
    out, plot = tmp_path / "convergence.json", tmp_path / "convergence.png"
    grid = ("--tasks", "digits", "--optimizers", "adamw", "--methods", "K=2, plain")
    size = ("--seeds", "0", "--factors", "1.0", "--steps", "30")
    files = ("--out", str(out), "--plot", str(plot))
    assert "K=2, plain" in experiment("convergence", *grid, *size, *files)
    assert json.loads(out.read_text())["runs"][-1]["method"] == "K=2, plain"
    assert plot.stat().st_size > 10_000


@pytest.mark.full
def test_delay_robust_experiment_writes_test_losses(tmp_path, run):
    out = tmp_path / "delay_robust.json"
    grid = ("--shares", "0.2", "--averaged", "0.02", "--widths", "2", "--seeds", "0")
    size = ("--data", "digits", "--optimizers", "adamw", "--steps", "30")
    assert "0.2, 0.02" in run("delay_robust", *grid, *size, "--out", str(out))
    (row,) = json.loads(out.read_text())["test_loss"].values()
    assert row.keys() == {"synchronous", "rule", "0.2, 0.02"}


@pytest.mark.full
def test_codecs_experiment_writes_sent_bytes(tmp_path, where, run):
    out = tmp_path / "codecs.json"
    rows = ("none", "sign, fed back", *(["power_sgd"] if where == "alone" else ()))
    grid = ("--data", "digits", "--rows", *rows)
    size = ("--seeds", "0", "--steps", "20", "--batch-size", "64", "--out", str(out))
    run("codecs", *grid, "--widths", "2", *size, "--plot", str(tmp_path / "plot.png"))
    found = json.loads(out.read_text())["codecs"]
    assert found.keys() == set(rows)
    sizes = [row["bytes_sent"] for row in found.values()]
    assert sizes[0] == max(sizes) > 8 * max(sizes[1:])
    assert all(len(row["width 2"]) == 1 for row in found.values())


def test_codec_speed_in_process_writes_its_result(tmp_path, monkeypatch):
    """Measures one codec in this process, which has its pages and cores already."""
    name, out = "int8, block 256", tmp_path / "codec_speed.json"
    monkeypatch.setattr(codec_speed, "CODECS", {name: codec_speed.CODECS[name]})
    monkeypatch.setattr(codec_speed, "child", lambda config, _: measured(config))
    measured = codec_speed.measured
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    here.limit_devices(monkeypatch)
    codec_speed.main(codec_speed.Config(mebibytes=1, rounds=3, out=out))
    check_codec_speed(out)


@pytest.mark.full
def test_codec_speed_command_writes_its_result(tmp_path):
    out = tmp_path / "codec_speed.json"
    size = ("--mebibytes", "1", "--rounds", "3")
    experiment("codec_speed", *size, "--out", str(out))
    check_codec_speed(out)


def check_codec_speed(out):
    pages = json.loads(out.read_text())["pages"]
    assert pages.keys() == {"huge pages", "small pages"}
    for rows in pages.values():
        assert rows["copy"]["speed of the copy"] == 1
        assert rows["int8, block 256, both"]["speed of the copy"] > 0
        encode = rows["int8, block 256, encode"]["bytes moved"]
        assert encode == 2**18 * (4 + 1 + 4 / 256)


def test_checkpoint_cost_experiment_writes_times_and_sizes(tmp_path, run):
    out = tmp_path / "checkpoint_cost.json"
    size = ("--widths", "8", "--rounds", "2")
    assert "of the restore" in run("checkpoint_cost", *size, "--out", str(out))
    (cell,) = json.loads(out.read_text())["cells"]
    # Parameters, two moments, a gradient in flight, and a few numbers.
    assert cell["bytes"] == pytest.approx(
        4 * checkpoint_cost.LAYERS * 8 * 8 * 4, rel=0.05
    )
    assert cell["seconds"].keys() == {"save", "restore", "checksums", "copy"}
    assert all(len(times) == 2 for times in cell["seconds"].values())


@pytest.mark.full
def test_levels_experiment_counts_bytes_between_hosts(tmp_path, run):
    out = tmp_path / "levels.json"
    printed = run("levels", "--steps", "3", "--out", str(out), "--seeds", "0")
    assert "between hosts" in printed
    rows = json.loads(out.read_text())["rows"]
    assert rows["int8, nowhere"]["error"] < 1e-6
    assert 0 < rows["int8, between hosts"]["error"] < 0.1
    # Over four hosts as many bytes are sent as over a ring of four: 2 (4 - 1)/4 of the
    # coded bytes.
    sent = {name: row["bytes_between_hosts"] for name, row in rows.items()}
    assert sent["int8, between hosts"] == sent["int8, at both levels"]
    assert sent["int8, between hosts"] < sent["int8, flat ring, at every hop"]


@pytest.mark.full
def test_wire_experiment_writes_known_byte_ratios(tmp_path, run):
    out = tmp_path / "wire.json"
    few = ("none", "int8", "power_sgd")
    run("wire", "--gpu", "None", "--codecs", *few, "--out", str(out))
    rows = json.loads(out.read_text())["rows"]
    assert {row["codec"] for row in rows} == set(few)
    assert all(row["same"] for row in rows)
    ratios = {(row["algorithm"], row["codec"]): row["ratio"] for row in rows}
    assert ratios["ring", "none"] == pytest.approx(1, rel=1e-4)
    assert ratios["parameter_server", "none"] == pytest.approx(4, rel=1e-4)
    assert ratios["two_shot", "int8"] == pytest.approx(0.25 * (1 + 4 / 256), rel=1e-3)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_committed_results_name_their_command_and_origin(path):
    record = json.loads(path.read_text())
    command, experiment = record["command"].split(maxsplit=3)[:3][::2]
    assert command == "python"
    assert path.stem.startswith(
        experiment.removeprefix("experiments.").replace(".", "_")
    )
    assert importlib.util.find_spec(experiment)
    assert "/" not in record["command"], "a place on somebody's machine"
    assert {"commit", "date", "device", "python", "versions", "seed"} <= record.keys()
    assert "dirty" not in record["commit"]


def test_log_survives_a_cut_line_and_resumes_at_a_step(tmp_path):
    with logs.Log(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(step, {"loss": float("nan") if step == 1 else 1.0 / step})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "lo')
    with logs.Log(tmp_path, resume_step=2) as log:
        log.write(3, {"loss": 7.0})
    assert [row["loss"] for row in logs.read(path)] == [None, 0.5, 7.0]
