"""Tests experiments on hosts of an emulated cluster, on a small scale."""

import dataclasses
import importlib
import importlib.util
import itertools
import json
import os
import pathlib
import sys
import tempfile
import time

import jax
import numpy as np
import pytest
import tyro

from experiments import (
    allreduce_profile,
    cluster,
    paper,
    prediction,
    report,
    scaling,
    speedup,
    time_to_accuracy,
)
from experiments.cluster import member
from experiments.methods import Problem
from pipejax import timing

from . import here
from .test_cluster import needs_namespaces, run
from .test_data import REAL
from .test_measurements import experiment

SMALL = ("--problem.model", "mlp", "--problem.batch-size", "8")
ALL = ("compute", "PS-Sync", "PS-Async", "D-Sync", "Pipe-SGD", "Pipe-SGD, int8")


BYTES = 1000


@pytest.fixture
def hosts_here(monkeypatch):
    """Replaces the hosts of clusters by devices of this process.

    Each reading of the link shows that it has carried `BYTES` more.
    """

    def ask(network, module, flags, log=None):
        def join():
            jax.config.update("jax_num_cpu_devices", network.size)
            return 0

        del log
        monkeypatch.setattr(member, "join", join)
        found = importlib.import_module(module)
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "answer.json"
            found.main(tyro.cli(found.Config, args=[*flags, "--out", str(out)]))
            return json.loads(out.read_text())

    here.limit_devices(monkeypatch)
    monkeypatch.setenv("NPROC", os.environ["NPROC"])  # the experiment sets this
    # DDP needs a cluster, so PyTorch is hidden.
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: find(name) if name != "torch" else None,
    )
    monkeypatch.setattr(cluster, "ask", ask)
    carried = (member.Counters(BYTES * n, 0) for n in itertools.count())
    monkeypatch.setattr(member, "wire", lambda: next(carried))


@pytest.mark.full
@needs_namespaces
@pytest.mark.parametrize(
    ("names", "rounds"),
    [
        (("compute", "D-Sync", "Pipe-SGD, int8"), 1),
        pytest.param(ALL, 2, marks=pytest.mark.full),
    ],
)
def test_methods_side_by_side_send_the_bytes_of_their_algorithm(
    tmp_path, names, rounds
):
    """Each method sends the bytes of its algorithm, and "compute" sends none."""
    out = tmp_path / "figures.json"
    measured = [name for name in names if name == "Pipe-SGD"]
    flags = ("--rounds", str(rounds), "--measured", *measured, "--out", str(out))
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
    # Each of two hosts sends a whole vector in total. So does the server, and so does a
    # worker to the server.
    for name in {"PS-Sync", "PS-Async", "D-Sync", "Pipe-SGD"} & sent.keys():
        assert vector < sent[name] < 1.15 * vector, name
    assert vector / 4 < sent["Pipe-SGD, int8"] < 1.2 * vector / 4
    for row in figures["methods"].values():
        assert len(row["seconds"]) == len(row["cores"]) == rounds
    assert list(figures["measured"]) == measured
    for times in figures["measured"].values():
        assert len(times["ratio"]) == rounds


def test_work_of_one_core_is_counted_as_its_share():
    """A tenth of a second on one core is its share of all cores, to a tick of each."""
    before, start = member.cores(), time.process_time()
    while time.process_time() - start < 0.1:
        pass
    assert member.cores() - before >= 0.1 / os.cpu_count() - 0.01


def test_rows_of_a_table_compare_each_method_with_its_limit():
    """The limit is the longer of a method's own compute and its time on the wire."""
    found = {
        "compute": {"seconds": [1.0, 1.0], "cores": [0.9, 0.9], "wire_bytes": 0},
        "D-Sync": {"seconds": [4.0, 6.0], "cores": [1.0, 2.0], "wire_bytes": 30},
        "Pipe-SGD": {"seconds": [2.0, 2.0], "cores": [1.8, 1.9], "wire_bytes": 15},
        "DDP compute": {"seconds": [1.6, 1.6], "cores": [1.6, 1.6], "wire_bytes": 0},
        "DDP": {"seconds": [3.0, 3.0], "cores": [2.0, 2.0], "wire_bytes": 15},
    }
    rows = speedup.rows(found, bandwidth=10)
    assert [rows[n]["limit"] for n in ("D-Sync", "Pipe-SGD", "DDP")] == [3, 1.5, 1.6]
    assert rows["Pipe-SGD"]["ratio_to_limit"] == pytest.approx(2 / 1.5)
    ratios = [rows[n]["ratio_to_compute"] for n in ("D-Sync", "Pipe-SGD", "DDP")]
    assert ratios == pytest.approx([5, 2, 3 / 1.6])
    assert rows["Pipe-SGD"]["cores"] == pytest.approx(1.85)
    assert rows["Pipe-SGD"]["faster_than"]["D-Sync"] == [2.25, 2.5, 2.75]
    assert rows["Pipe-SGD"]["faster_than"]["DDP"][1] == 1.5


@pytest.mark.full
def test_speedup_in_process_writes_result_and_plot(tmp_path, hosts_here):
    out, plot = tmp_path / "speedup.json", tmp_path / "speedup.png"
    size = {"cells": (5,), "rounds": 2, "methods": ("D-Sync", "DDP")}
    speedup.main(speedup.Config(**size, out=out, plot=plot))
    (cell,) = json.loads(out.read_text())["cells"]
    names = {"compute", "DDP compute", "D-Sync", "DDP"}
    assert cell["rows"].keys() | cell["missing"].keys() == names
    # A turn has one step that fills the pipeline and one that is timed.
    assert cell["rows"]["D-Sync"]["wire"] == BYTES / 2 / (100e6 / 8)
    assert plot.exists()


def test_partial_run_keeps_the_other_cells(tmp_path, monkeypatch):
    """Each cell has its own commit, date and processor. The list gives their order."""

    def measured(cell, config):
        row = {"step": 1.0}
        problem = dataclasses.asdict(cell.problem)
        return {"problem": problem, "rate": cell.rate, "rows": {"D-Sync": row}}

    monkeypatch.setattr(speedup, "measured", measured)
    monkeypatch.setattr(speedup, "show", lambda cell: None)
    out, plot = tmp_path / "speedup.json", tmp_path / "speedup.png"
    for number, commit in ((6, "first"), (1, "second"), (6, "third")):
        monkeypatch.setattr(report, "commit", lambda commit=commit: commit)
        speedup.main(speedup.Config(cells=(number,), out=out, plot=plot))
    found = json.loads(out.read_text())["cells"]
    assert [(x["problem"]["model"], x["commit"]) for x in found] == [
        ("wide_mlp", "second"),
        ("cnn", "third"),
    ]
    assert all(x["cpu"] == report.cpu() for x in found)


@pytest.mark.full
@needs_namespaces
def test_speedup_command_writes_result_and_plot(tmp_path):
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


@pytest.mark.full
def test_prediction_in_process_writes_result_and_plot(
    tmp_path, hosts_here, monkeypatch, capsys
):
    few = {name: timing.COST_MODELS[name] for name in ("psum", "ring")}
    monkeypatch.setattr(timing, "COST_MODELS", few)
    out, plot = tmp_path / "prediction.json", tmp_path / "prediction.png"
    size = {"hosts": (2,), "rates": ("1gbit",), "elements": 65536, "rounds": 1}
    prediction.main(prediction.Config(**size, codecs=("int8",), out=out, plot=plot))
    assert "median and worst error" in capsys.readouterr().out
    (cell,) = json.loads(out.read_text())["cells"]
    names = ["psum, uncompressed", "ring, uncompressed", "ring, int8"]
    assert list(cell["rows"]) == names
    for row in cell["rows"].values():
        assert row["predicted"] == pytest.approx(sum(row["parts"].values()))
    assert plot.exists()


@pytest.mark.full
@needs_namespaces
def test_prediction_command_writes_result_and_plot(tmp_path):
    out, plot = tmp_path / "prediction.json", tmp_path / "prediction.png"
    size = ("--hosts", "2", "--rates", "1gbit", "--elements", "65536", "--rounds", "1")
    files = ("--out", str(out), "--plot", str(plot))
    printed = experiment("prediction", *size, "--codecs", "int8", *files)
    assert "median and worst error" in printed
    (cell,) = json.loads(out.read_text())["cells"]
    # There are six algorithms with two codecs, except psum with int8.
    assert len(cell["rows"]) == 11
    for row in cell["rows"].values():
        assert row["predicted"] == pytest.approx(sum(row["parts"].values()))
    assert plot.exists()


@pytest.mark.full
def test_allreduce_profile_in_process_writes_result_and_plot(
    tmp_path, hosts_here, monkeypatch
):
    def algorithms(devices, codec):
        found = every(devices, codec)
        return {name: found[name] for name in ("hierarchical", "ring") if name in found}

    every = allreduce_profile.algorithms
    monkeypatch.setattr(allreduce_profile, "algorithms", algorithms)
    out, plot = tmp_path / "profile.json", tmp_path / "profile.png"
    size = {"hosts": (2,), "elements": 4096, "rounds": 1, "codecs": ("int8",)}
    allreduce_profile.main(allreduce_profile.Config(**size, out=out, plot=plot))
    flat, levels = json.loads(out.read_text())["cells"]
    assert list(flat["rows"]) == ["ring, int8"]
    assert list(levels["rows"]) == ["hierarchical, int8", "ring, int8"]
    for row in (*flat["rows"].values(), *levels["rows"].values()):
        # BYTES are carried in two exchanges, one of which compiles.
        assert row["wire_bytes"] == BYTES / 2
    assert plot.exists()


@pytest.mark.full
@needs_namespaces
def test_allreduce_profile_command_writes_result_and_plot(tmp_path):
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


def test_parts_of_a_step_explain_its_time():
    """A synchronous step takes the sum of its parts, a pipelined one the longer."""
    answer = {
        "methods": {
            "compute": {"seconds": [2.0, 2.0], "cores": [2.0, 2.0], "wire_bytes": 0},
            "D-Sync": {"seconds": [5.0, 7.0], "cores": [2.0, 2.0], "wire_bytes": 30},
            "Pipe-SGD": {"seconds": [3.0, 3.0], "cores": [2.0, 2.0], "wire_bytes": 30},
            "PS-Async": {"seconds": [9.0, 9.0], "cores": [2.0, 2.0], "wire_bytes": 60},
        },
        "profiles": {"D-Sync": {"exchange": 4.0, "codec": 1.0}},
    }
    rows = paper.rows([answer], bandwidth=10)
    for name, explained in (("D-Sync", 6 / 6), ("Pipe-SGD", 3 / 4)):
        found = rows[name]
        parts = [found[key] for key in ("compute", "codec", "exchange", "wire")]
        assert parts == [2, 1, 3, 3]
        assert found["explained"] == explained
    assert rows["D-Sync"]["range"] == [5, 7]
    assert rows["Pipe-SGD"]["faster_than"] == {"D-Sync": 2, "PS-Async": 3}
    assert "exchange" not in rows["PS-Async"]


@pytest.mark.full
def test_paper_in_process_writes_result_and_plot(tmp_path, hosts_here, monkeypatch):
    """Both a run of all methods and a run for each of them."""
    small = Problem("softmax", 4, images="digits")
    cells = (
        paper.Cell(small, "1gbit"),
        paper.Cell(small, "2gbit", together=False),
    )
    monkeypatch.setattr(paper, "CELLS", cells)
    out, plot = tmp_path / "paper.json", tmp_path / "paper.png"
    names = ("D-Sync", "Pipe-SGD")
    size = {"cells": (0, 1), "rounds": 2, "steps": 1, "methods": names}
    paper.main(paper.Config(**size, out=out, plot=plot))
    for cell in json.loads(out.read_text())["cells"]:
        assert cell["elements"] == 650
        assert cell["images"] == "random"
        assert list(cell["rows"]) == list(names)
        for row in cell["rows"].values():
            assert row["compute"] > 0
            assert row["codec"] + row["exchange"] > 0
    assert plot.exists()


def test_batches_of_real_images_differ_between_hosts(tmp_path):
    """Each host has its own images, and as many as its problem says."""
    problem = Problem("mlp", 4, images="digits")
    first, second = (problem.real_batch(host, tmp_path) for host in (0, 1))
    assert first["image"].shape == second["image"].shape == (4, 8, 8, 1)
    assert (first["image"] != second["image"]).any()
    assert first["label"].shape == (4,)


@pytest.mark.full
@needs_namespaces
def test_paper_command_writes_result_and_plot(tmp_path):
    out, plot = tmp_path / "paper.json", tmp_path / "paper.png"
    files = ("--out", str(out), "--plot", str(plot))
    printed = experiment("paper", "--cells", "0", "--rounds", "2", *files)
    assert "explained" in printed
    (cell,) = json.loads(out.read_text())["cells"]
    assert tuple(cell["rows"]) == paper.METHODS
    assert plot.exists()


def test_pause_returns_the_gradient_of_its_batch():
    problem = scaling.Pause(seconds=0.01, size=8)
    batch = problem.random_batch(0)
    start = time.monotonic()
    gradient = jax.jit(jax.grad(problem.loss))(problem.start, batch)["w"]
    assert (gradient == batch["gradient"][0]).all()
    assert time.monotonic() - start >= 0.01
    assert problem.elements == 8


@pytest.mark.full
def test_scaling_in_process_writes_result_and_plot(
    tmp_path, hosts_here, monkeypatch, capsys
):
    few = {name: scaling.METHODS[name] for name in ("D-Sync", "Pipe-SGD, int8")}
    monkeypatch.setattr(scaling, "METHODS", few)
    monkeypatch.setattr(
        scaling.Pause,
        "random_batch",
        lambda self, host: {"gradient": np.ones((4, self.size), np.float32)},
    )
    out, plot = tmp_path / "scaling.json", tmp_path / "scaling.png"
    size = {"hosts": (4,), "simulated": (16,), "elements": 4096, "rounds": 1}
    scaling.main(scaling.Config(**size, steps=1, seconds=0.01, out=out, plot=plot))
    assert "Efficiency" in capsys.readouterr().out
    real, many = json.loads(out.read_text())["cells"]
    for name in few:
        low, middle, high = real["measured"][name]
        assert 0 < low <= middle <= high <= 1
        assert 0 < many["simulated"][name] <= 1 + 1e-6
    assert many["measured"] is None
    assert plot.exists()


def test_simulated_efficiency_of_a_server_is_limited_by_its_link():
    """The link carries three gradients in each step of the slowest worker."""
    four = timing.Cluster(4, timing.Link(0.0, 4e6))
    work = timing.Workload(0.5, 10**6)  # each transfer takes a second
    found = scaling.asynchronous(four, work, steps=40)
    assert found == pytest.approx(0.5 / 3, rel=0.05)


def test_worker_beside_the_server_waits_only_for_own_transfers():
    two = timing.Cluster(2, timing.Link(0.0, 4e6))
    work = timing.Workload(2.0, 10**6)
    assert scaling.asynchronous(two, work) == pytest.approx(2 / (1 + 2 + 1))


@pytest.mark.full
@needs_namespaces
def test_scaling_command_writes_result_and_plot(tmp_path):
    out, plot = tmp_path / "scaling.json", tmp_path / "scaling.png"
    size = ("--hosts", "1", "4", "--simulated", "8", "--elements", "65536")
    files = ("--rounds", "1", "--out", str(out), "--plot", str(plot))
    printed = experiment("scaling", *size, "--seconds", "0.05", *files)
    assert "Efficiency" in printed
    one, four, _ = json.loads(out.read_text())["cells"]
    for cell in (one, four):
        assert list(cell["measured"]) == list(scaling.METHODS)
    assert plot.exists()


def test_seeds_are_drawn_on_one_axis():
    """The axis goes from the latest first test to the mean end, with straight lines."""
    rows = [
        {"seconds": [1.0, 3.0], "accuracy": [0.2, 0.6]},
        {"seconds": [2.0, 5.0], "accuracy": [0.3, 0.9]},
    ]
    seconds, accuracies = time_to_accuracy.over_seconds(rows)
    assert (seconds[0], seconds[-1]) == (2.0, 4.0)
    assert accuracies[:, 0] == pytest.approx([0.4, 0.3])
    assert accuracies[:, -1] == pytest.approx([0.6, 0.7])


@pytest.mark.full
def test_time_to_accuracy_in_process_writes_result_and_plot(
    tmp_path, hosts_here, monkeypatch, capsys
):
    race = time_to_accuracy.RACES["digits"]
    race = dataclasses.replace(race, problem=Problem("mlp", 128, images="digits"))
    monkeypatch.setitem(time_to_accuracy.RACES, "digits", race)
    out, plot = tmp_path / "race.json", tmp_path / "race.png"
    names = ("Pipe-SGD, int8", "DDP")
    size = {"seeds": (0,), "steps": 20, "tests": 2, "methods": names, "hosts": 2}
    time_to_accuracy.main(time_to_accuracy.Config("digits", **size, out=out, plot=plot))
    assert "final accuracy" in capsys.readouterr().out
    runs = json.loads(out.read_text())["runs"]["0"]
    assert list(runs) == list(names)
    found = runs["Pipe-SGD, int8"]
    assert found["seconds"] == sorted(found["seconds"])
    assert found["accuracy"][-1] > 0.3
    assert plot.exists()


@pytest.mark.full
@needs_namespaces
@pytest.mark.skipif(not REAL.exists(), reason="no MNIST here")
def test_time_to_accuracy_command_writes_result_and_plot(tmp_path):
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


def test_broken_off_race_continues_with_its_finished_seeds(tmp_path, monkeypatch):
    """A race continues with its finished seeds if commit and settings are the same."""
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
