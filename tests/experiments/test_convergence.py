"""Tests the convergence experiment: what it runs, tunes, keeps and continues."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.convergence import __main__ as convergence

from ..grid import grid
from . import here

SMALL = dict(
    optimizers=("momentum",),
    methods=("K=2, plain", "K=2, predicted", "K=3, last update"),
    factors=(1.0,),
    seeds=(0,),
    cpu_devices=4,
    steps=50,
)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is\n" * 100)
    return convergence.Config(
        **SMALL,
        tasks=("digits", "shakespeare"),
        text=tmp_path / "text.txt",
        out=tmp_path / "convergence.json",
        plot=tmp_path / "convergence.png",
    )


@pytest.fixture
def smaller(config, monkeypatch):
    """Returns a configuration with one task, and few learning rates and methods."""
    momentum = convergence.OPTIMIZERS["momentum"]
    few = dataclasses.replace(momentum, rates=momentum.rates[2:4])
    monkeypatch.setitem(convergence.OPTIMIZERS, "momentum", few)
    methods = ("K=2, predicted", "K=3, last update")
    return dataclasses.replace(config, tasks=("digits",), methods=methods, steps=30)


@pytest.mark.parametrize(
    "size", [pytest.param(x, marks=pytest.mark.full) for x in ("smaller", "config")]
)
def test_each_run_is_done_once_and_missing_runs_are_added(
    size, request, monkeypatch, capsys
):
    config = request.getfixturevalue(size)
    here.limit_devices(monkeypatch)
    result = convergence.main(config)
    methods = [run["method"] for run in result["runs"] if run["task"] == "digits"]
    swept = len(convergence.OPTIMIZERS["momentum"].rates)
    # The sweep contains the tuned synchronous run.
    assert methods == ["K=1"] * swept + list(config.methods)
    assert all(len(run["losses"]) == 25 for run in result["runs"])
    assert all(run["commit"] for run in result["runs"])
    assert config.plot.stat().st_size > 10_000
    assert "beside K=1" in capsys.readouterr().out

    written = json.loads(config.out.read_text())
    config.out.write_text(json.dumps(written | {"runs": written["runs"][:-1]}))
    trained = []

    last = written["runs"][-1]

    def train(task, how, optimizer, *, rate, seed, devices):
        trained.append((how, rate, seed))
        return last

    monkeypatch.setattr(convergence, "train", train)
    convergence.run_all(config)
    how = convergence.METHODS[last["method"]]
    assert trained == [(how, last["rate"], last["seed"])]


def test_added_runs_keep_the_settings_of_the_result(config, monkeypatch):
    before = {"cpu_devices": 4, "steps": 50, "factors": [1.0, 2.0], "seeds": [0, 1, 2]}
    config.out.write_text(json.dumps(before | {"runs": []}))
    ended = {"test_loss": 1.0, "test_accuracy": 0.5}
    monkeypatch.setattr(convergence, "train", lambda *_, **__: ended)
    part = dataclasses.replace(config, tasks=("digits",))
    added = convergence.run_all(part)
    assert added["runs"]
    assert added.items() >= before.items()
    written = config.out.read_text()
    assert json.loads(written).items() >= added.items()

    convergence.run_all(part)
    assert config.out.read_text() == written, "there was nothing to run"


def test_runs_of_other_settings_are_refused(config):
    runs = {"cpu_devices": 4, "steps": 7, "factors": [], "seeds": [], "runs": []}
    config.out.write_text(json.dumps(runs))
    with pytest.raises(ValueError, match="has runs of other settings"):
        convergence.run_all(config)
    assert json.loads(config.out.read_text()) == runs


def test_tuned_rate_has_the_least_synchronous_loss():
    runs = [
        convergence.key("digits", "momentum", rate, "K=1", 0) | {"test_loss": loss}
        for rate, loss in ((0.0125, 2.0), (0.025, 1.0), (0.05, 1.5), (0.1, None))
    ]
    assert convergence.tuned_rate("digits", "momentum", 0, runs) == 0.025


def run(method, seed, loss, accuracy):
    ends = {"test_loss": loss, "test_accuracy": accuracy}
    return convergence.key("digits", "momentum", 0.1, method, seed) | ends


RESULT = {
    "runs": [
        *(run("K=1", 0, 0.5, 0.9), run("K=1", 1, 0.7, 0.8)),
        *(run("K=2, plain", 0, None, 0.1), run("K=2, plain", 1, 0.9, 0.7)),
        *(run("K=2, predicted", 0, 0.52, 0.9), run("K=2, predicted", 1, 0.7, 0.796)),
        *(run("K=3, plain", 0, 0.52, 0.89), run("K=3, plain", 1, 0.74, 0.795)),
        *(run("K=3, predicted", 0, 0.52, 0.89), run("K=3, predicted", 1, 0.72, 0.8)),
    ],
    "seeds": [0, 1],
    "factors": [1.0],
}


def test_rows_show_changes_by_seed_with_marks_for_failures():
    titles, row = convergence.rows(RESULT)
    assert dict(zip(titles, row, strict=True)) == {
        "task": "digits",
        "optimizer": "momentum",
        "rate": "0.1",
        "K=1": "0.6000, 85.0 %",
        "K=2, plain": "diverged",
        # K=2 may lose 0.2 points or 0.01 nats, and K=3 twice as much.
        "K=2, predicted": "+0.0100 ± 0.0100, -0.20 ± 0.20",
        "K=2, robust": "",  # was not run
        "K=3, plain": "+0.0300 ± 0.0100, -0.75 ± 0.25 *",
        "K=3, predicted": "+0.0200 ± 0.0000, -0.50 ± 0.50",
        "K=3, robust": "",
    }


def test_ends_are_means_for_every_method_with_runs():
    titles, *rows = convergence.ends(RESULT)
    assert titles == ["", "near K=1", "digits, momentum"]
    found = {method: cells for method, *cells in rows}
    assert list(found) == list(convergence.METHODS)
    assert found["K=1"] == ["", "0.6000, 85.0 %"]
    assert found["K=2, plain"] == ["0 of 1", "diverged"]
    assert found["K=2, predicted"] == ["1 of 1", "0.6100, 84.8 %"]
    assert found["K=3, plain"] == ["0 of 1", "0.6300, 84.2 %"]
    assert found["K=2, DC-ASGD"] == ["", ""]


def test_counts_are_given_for_tasks_by_optimizer():
    titles, row, *others = convergence.counts(RESULT)
    found = dict(zip(titles, row, strict=True))
    assert (found["optimizer"], found["rate"]) == ("momentum", "tuned")
    assert found["K=2, plain"] == "0 of 1"
    assert found["K=2, predicted"] == "1 of 1"
    assert found["K=2, robust"] == ""
    assert [other[0] for other in others] == ["adamw", "muon"]
    assert not any("".join(other[2:]) for other in others), "not run"


@grid(1, method=convergence.METHODS, optimizer=convergence.OPTIMIZERS)
def test_every_method_fits_every_optimizer(method, optimizer):
    tx = convergence.METHODS[method].corrected(
        convergence.OPTIMIZERS[optimizer],
        lambda count: 0.1,
        optax.clip_by_global_norm(1.0),
    )
    params = {"matrix": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    updates, _ = jax.jit(tx.update)(params, jax.jit(tx.init)(params), params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))
