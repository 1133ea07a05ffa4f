"""Experiments on hosts of an emulated cluster, small."""

import json
import sys

import pytest

from experiments import report, speedup, time_to_accuracy

from .test_cluster import needs_namespaces, run
from .test_data import REAL
from .test_measurements import experiment

SMALL = ("--problem.model", "mlp", "--problem.batch-size", "8")


@needs_namespaces
def test_side_by_side(tmp_path):
    """Each sends what its algorithm must; what sends nothing sends nothing."""
    out = tmp_path / "figures.json"
    names = ("compute", "PS-Sync", "PS-Async", "D-Sync", "Pipe-SGD", "Pipe-SGD, int8")
    flags = ("--rounds", "2", "--measured", "Pipe-SGD", "--out", str(out))
    module = (sys.executable, "-m", "experiments.side_by_side")
    code, hosts, said = run(
        *("--hosts", "2", "--rate", "500mbit"),
        command=[*module, *SMALL, "--methods", *names, *flags],
    )
    assert code == 0, (said, hosts)
    figures = json.loads(out.read_text())
    vector = 4 * figures["elements"]
    sent = {name: row["wire_bytes"] for name, row in figures["methods"].items()}
    assert list(sent) == list(names)
    assert sent["compute"] < 0.02 * vector
    # Of two hosts each sends a vector in all; so does the server, and so to the server.
    for name in ("PS-Sync", "PS-Async", "D-Sync", "Pipe-SGD"):
        assert vector < sent[name] < 1.15 * vector, name
    assert vector / 4 < sent["Pipe-SGD, int8"] < 1.2 * vector / 4
    assert all(len(row["seconds"]) == 2 for row in figures["methods"].values())
    assert len(figures["measured"]["Pipe-SGD"]["ratio"]) == 2


def test_rows_of_a_table():
    """The limit is the longer of a method's own compute and its bytes on the wire."""
    found = {
        "compute": {"seconds": [1.0, 1.0], "wire_bytes": 0},
        "D-Sync": {"seconds": [4.0, 6.0], "wire_bytes": 30},
        "Pipe-SGD": {"seconds": [2.0, 2.0], "wire_bytes": 15},
        "DDP compute": {"seconds": [1.6, 1.6], "wire_bytes": 0},
        "DDP": {"seconds": [3.0, 3.0], "wire_bytes": 15},
    }
    rows = speedup.rows(found, bandwidth=10)
    assert [rows[n]["limit"] for n in ("D-Sync", "Pipe-SGD", "DDP")] == [3, 1.5, 1.6]
    assert rows["Pipe-SGD"]["ratio_to_limit"] == pytest.approx(2 / 1.5)
    assert rows["Pipe-SGD"]["faster_than"]["D-Sync"] == [2.25, 2.5, 2.75]
    assert rows["Pipe-SGD"]["faster_than"]["DDP"][1] == 1.5


@needs_namespaces
def test_speedup(tmp_path):
    out, plot = tmp_path / "speedup.json", tmp_path / "speedup.png"
    names = ("compute", "PS-Sync", "D-Sync", "Pipe-SGD", "DDP compute")
    files = ("--out", str(out), "--plot", str(plot))
    printed = experiment(
        "speedup", "--cells", "5", "--rounds", "2", "--methods", *names, *files
    )
    assert "Pipelining alone gains at most" in printed
    (cell,) = json.loads(out.read_text())["cells"]
    assert cell["rows"].keys() | cell["missing"].keys() == set(names)
    assert plot.exists()


@needs_namespaces
def test_prediction(tmp_path):
    out, plot = tmp_path / "prediction.json", tmp_path / "prediction.png"
    size = ("--hosts", "2", "--rates", "1gbit", "--elements", "65536", "--rounds", "1")
    files = ("--out", str(out), "--plot", str(plot))
    printed = experiment("prediction", *size, "--codecs", "int8", *files)
    assert "median and worst error" in printed
    (cell,) = json.loads(out.read_text())["cells"]
    assert len(cell["rows"]) == 11  # six algorithms; but psum with int8
    for row in cell["rows"].values():
        assert row["predicted"] == pytest.approx(sum(row["parts"].values()))
    assert plot.exists()


@needs_namespaces
def test_allreduce_profile(tmp_path):
    out, plot = tmp_path / "profile.json", tmp_path / "profile.png"
    size = ("--hosts", "2", "--elements", "4096", "--rounds", "1", "--codecs", "int8")
    experiment("allreduce_profile", *size, "--out", str(out), "--plot", str(plot))
    flat, levels = json.loads(out.read_text())["cells"]
    assert len(flat["rows"]) == 5
    assert list(levels["rows"]) == [
        "hierarchical, int8",
        "ring, int8",
        "two_shot, int8",
    ]
    assert all(row["wire_bytes"] > 0 for row in flat["rows"].values())
    assert plot.exists()


@needs_namespaces
@pytest.mark.skipif(not REAL.exists(), reason="no MNIST here")
def test_time_to_accuracy(tmp_path):
    out, plot = tmp_path / "race.json", tmp_path / "race.png"
    names = ("PS-Async", "D-Sync", "Pipe-SGD, int8", "DDP")
    printed = experiment(
        "time_to_accuracy",
        *("--seeds", "0", "--steps", "20", "--tests", "2"),
        *("--methods", *names, "--data-dir", str(REAL)),
        *("--out", str(out), "--plot", str(plot)),
    )
    assert "final accuracy" in printed
    runs = json.loads(out.read_text())["runs"]["0"]
    for name in names[:3]:
        assert runs[name]["seconds"] == sorted(runs[name]["seconds"])
        assert runs[name]["accuracy"][-1] > 0.3
    assert plot.exists()


def test_a_race_that_was_broken_off_goes_on(tmp_path, monkeypatch):
    """With the seeds it has, if they are of the same commit and settings."""
    out, runs = tmp_path / "race.json", {"0": {"D-Sync": {}}}
    settings = {"steps": 20, "methods": ("D-Sync",)}
    assert time_to_accuracy.begun(out, settings) == {}
    monkeypatch.setattr(report, "commit", lambda: "one")
    report.save(out, seed=0, **settings, runs=runs)
    assert time_to_accuracy.begun(out, settings) == runs
    assert time_to_accuracy.begun(out, {**settings, "steps": 21}) == {}
    monkeypatch.setattr(report, "commit", lambda: "two")
    assert time_to_accuracy.begun(out, settings) == {}
    monkeypatch.setattr(report, "commit", lambda: "one-dirty")
    report.save(out, seed=0, **settings, runs=runs)
    assert time_to_accuracy.begun(out, settings) == {}
