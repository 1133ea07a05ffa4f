"""Tests the experiment on local steps: its table, and the methods of a host."""

import itertools
import json
import pathlib

import numpy as np
import pytest

from experiments import learning
from experiments.local_steps import (
    _learn,
    _tasks,
    accuracy,
    cluster,
    compiled,
    equal_time,
)
from experiments.local_steps._learn import SYNCHRONOUS, Method, known_as, local
from experiments.local_steps._member import makers, turn
from experiments.methods import Local, Problem, TextProblem
from experiments.report import result

from ..grid import each
from ..helpers import assert_bits_equal
from ..overlap.test_topology import GPU as NEEDS_GPU
from .here import limit_devices


def test_compute_utilisation_is_compute_over_step():
    cell = {
        "rate": "200mbit",
        "sync_every": 32,
        "elements": 10**6,
        "seconds": {"compute": [0.1, 0.1, 0.1], "local, hidden": [0.1, 0.125, 0.2]},
    }
    cell |= cluster.times(cell)
    other = {"rate": "200mbit", "seconds": {"DDP compute": [1, 1], "DDP": [4, 4]}}
    titles, row = cluster.rows([cell], [other])
    assert titles[3:] == ["DDP", "local, hidden"]
    # 6 MB at 25 MB/s are 0.24 s, the time of 2.4 steps.
    assert row == [
        *("200mbit", "32", "2.4"),
        *("0.25 (0.25 - 0.25)", "0.80 (0.50 - 1.00)"),
    ]


@pytest.mark.full
@pytest.mark.parametrize("name", ["local, hidden", "local, at once"])
def test_turn_of_local_steps_ends_with_equal_hosts(name, monkeypatch):
    monkeypatch.setattr("experiments.local_steps._member.member.barrier", lambda: None)
    problem = Problem("mlp", 8)
    method = makers(2)[name](problem)
    assert isinstance(method, Local)
    assert turn(method, problem.random_batch(0), 1) > 0
    assert method.state.position[:2] == (0, 0)
    assert method.params()["Dense_0"]["kernel"].shape == (784, 256)


def test_command_in_the_documents_has_its_result():
    """It may have been measured in parts."""
    config = cluster.Config()
    found = result("local_steps_cluster")["cells"]
    cells = [(cell["rate"], cell["sync_every"]) for cell in found]
    assert cells == [*itertools.product(config.rates, config.sync_every)]
    page = pathlib.Path(cluster.__file__).parents[2] / "docs/benchmarks/speed.md"
    text = " ".join(page.read_text().split())
    assert "`python -m experiments.local_steps.cluster`" in text


PIPELINE = Method("pipeline", 2)


@pytest.mark.full
@pytest.mark.parametrize(
    "method", each([PIPELINE, local(2, 2, "int4")], full=[PIPELINE])
)
def test_run_ends_with_the_test_loss_of_the_anchor(method, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 60)
    task = learning.characters(text, batch_size=8, steps=26)
    run = {**known_as("shakespeare", "adamw", 26, method), "rate": 0.01, "seed": 0}
    found = _learn.trained(task, run)
    assert len(found["losses"]) == 25
    assert found["test_loss"] < found["losses"][0]


def test_groups_share_the_batches_of_the_hosts_of_the_race(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 60)
    run = {**known_as(_tasks.NANOGPT, "adamw", 5, SYNCHRONOUS), "rate": 0.001}
    task = _tasks.task_of(run, text=text, data_dir=None)
    problem = TextProblem(text, steps=5, seed=3)
    shares = [next(problem.batches(host, 4))["tokens"] for host in range(4)]
    np.testing.assert_array_equal(
        next(task.batches(3))["tokens"], np.concatenate(shares)
    )
    assert_bits_equal(task.init(3), problem.start)
    assert _tasks.rate_of(_tasks.NANOGPT, "adamw", []) == problem.learning_rate
    with pytest.raises(ValueError, match="`optimizers` must be adamw for nanogpt"):
        _tasks.optimizer_of(task, {**run, "optimizer": "muon"})


def cell(method, seed, loss, steps=100):
    known = known_as("mnist", "adamw", steps, method)
    return {**known, "seed": seed, "test_loss": loss}


def test_cells_are_changes_from_the_synchronous_run_of_the_seed():
    cells = [cell(SYNCHRONOUS, 0, 0.2), cell(SYNCHRONOUS, 1, 0.3)]
    cells += [cell(local(4, 0), 0, 0.25), cell(local(4, 0), 1, 0.37)]
    cells += [cell(local(4, 4), seed, loss) for seed, loss in enumerate((None, 0.3))]
    cells += [cell(local(4, 4, "int8"), 1, 0.31), cell(local(8, 4), 1, 0.31)]
    titles, row = accuracy.rows(cells)
    # Of eight bits, and of other rounds, a seed is missing.
    assert titles[3:] == ["H", "at once", "V = H"]
    ended = ["+0.060 ± 0.010", "diverged"]
    assert row == ["mnist", "adamw", "0.250", "4", *ended]


def test_runs_have_the_tuned_rate():
    tuning = result("convergence")["runs"]
    found = list(accuracy.runs(accuracy.Config(seeds=(0, 1)), tuning))
    assert len(found) == 2 * 2 * (1 + 3 * 6)
    assert {run["rate"] for run in found} == {0.008}


def test_fewer_steps_fit_beside_exchanges_at_once():
    hidden, *at_once = equal_time.contenders(4, 1000)
    assert hidden == (1000, local(4, 4))
    # Of 8 steps and an exchange, 8/12 are steps.
    assert at_once[0] == (667, local(8, 0))


def test_best_round_at_once_is_compared_after_equal_time():
    hidden, *at_once = equal_time.contenders(4, 1000)
    cells = [cell(hidden[1], seed, 0.2 + seed, hidden[0]) for seed in (0, 1)]
    for (steps, method), loss in zip(at_once, (0.5, 0.3, 0.4), strict=True):
        cells += [cell(method, seed, loss + seed, steps) for seed in (0, 1)]
    _, row = equal_time.rows(cells, 1000)
    losses = ["0.700", "0.800", "16", "-0.100 ± 0.000"]
    assert row == ["mnist", "adamw", "4", *losses]
    assert len(equal_time.rows(cells[:-1], 1000)) == 1  # a run is missing


@NEEDS_GPU
@pytest.mark.full
def test_steps_compiled_for_two_hosts_hide_both_collectives(tmp_path, monkeypatch):
    limit_devices(monkeypatch)
    out, steps = tmp_path / "out.json", ("no chunk", "mean, int8")
    name = "nano in groups on h100:1x2x2"
    compiled.main(compiled.Config((name,), steps, out))
    twin, coded = json.loads(out.read_text())["cells"]
    assert twin["beside_chunk"] is None
    assert coded["beside_chunk"] >= 0.95
    assert coded["checks"]["inside"]
    # Only a step with a codec has a residual.
    assert coded["memory"] > twin["memory"] + 0.9


def test_compiled_result_has_every_program_of_a_clean_commit():
    found = result("local_steps_compiled")
    page = pathlib.Path(cluster.__file__).parents[2] / "docs/benchmarks/schedules.md"
    assert f"`{found['command']}`" in page.read_text()
    cells = found["cells"]
    names = [(cell["model"], cell["step"]) for cell in cells]
    assert names == [*itertools.product(compiled.CELLS, compiled.STEPS)]
    assert not any("dirty" in cell["commit"] for cell in cells)
