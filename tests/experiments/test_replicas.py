"""Tests that simulated replicas train as devices do, and what the experiment runs."""

import dataclasses
import math

import chex
import jax
import numpy as np
import pytest

import pipejax as pj
from experiments.methods import NAMES
from experiments.replicas import __main__ as replicas
from experiments.replicas import _runs, _table, cluster, nanogpt, picture
from experiments.replicas._methods import bytes_of
from experiments.replicas._simulated import Simulated
from experiments.sharded import model

from ..grid import grid
from ..helpers import OPTIMIZERS, batches, init_params, loss_fn
from . import here

STEPS = 6
FED_BACK = pj.codecs.error_feedback(pj.codecs.int4())
SETTINGS = {
    "K=1": {"width": 1},
    "K=2": {},
    "K=3": {"width": 3},
    "warm-up": {"warmup_steps": 2},
    "own": {"weight_prediction": "own"},
    "int4 fed back": {"all_reduce": pj.collectives.two_shot(FED_BACK)},
    "rank 1 at once": {"at_once": pj.codecs.power_sgd(1, jax.random.key(0))},
    "delayed": {"delayed": {"hidden": True, "bias": False, "out": True}},
}


@grid(1, count=[4, 8], name=SETTINGS, tx=["clip+adamw", "momentum"])
def test_simulated_replicas_train_as_devices(count, name, tx):
    def made(devices):
        return pj.make_train_step(
            loss_fn,
            OPTIMIZERS[tx],
            mesh=pj.data_mesh(devices),
            executor="fused",
            **SETTINGS[name],
        )

    data, train = batches(STEPS), made(count)
    state = train.init(init_params())
    losses = []
    for batch in data:
        state, info = train.step(state, batch)
        losses.append(float(info.loss))
    wanted = jax.device_get(train.drain(state)[0].params)
    simulated = Simulated(made(1), count)
    state, found = simulated.run(simulated.init(init_params()), iter(data), STEPS)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    params = jax.device_get(simulated.drained(state))
    chex.assert_trees_all_close(params, wanted, rtol=0, atol=2e-6)


def test_step_of_several_devices_is_not_simulated():
    train = pj.make_train_step(loss_fn, OPTIMIZERS["sgd"], mesh=pj.data_mesh(2))
    with pytest.raises(ValueError, match=r"`train` must be .* mesh of one device"):
        Simulated(train, 4)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setitem(_runs.FIRST, "digits", {"momentum": 0.8})
    return replicas.Config(
        task="digits",
        optimizers=("momentum",),
        methods=("K=2", "K=2, rank 4 at once", "K=2, least delay"),
        replicas=(4, 16, 100),
        seeds=(0, 1),
        steps=20,
        out=tmp_path / "replicas.json",
    )


@pytest.mark.full
def test_each_run_is_done_once_and_the_table_has_all(config, monkeypatch, capsys):
    here.limit_devices(monkeypatch)
    result = replicas.main(config)
    runs = result["runs"]
    first = [run for run in runs if run["method"] == "K=1" and run["seed"] == 0]
    rates = {run["rate"]: run["test_loss"] for run in first}
    best = min(rates, key=lambda rate: rates[rate] or math.inf)
    assert {best / 2, best, 2 * best} <= rates.keys()
    # One more synchronous seed, two methods for 4 and 16 replicas, and one for any.
    assert len(runs) == len(rates) + 1 + 2 * 2 * 2 + 2
    titles, *rows = replicas.delay_rows(result)
    assert [row[:2] for row in rows] == [["momentum", "4"], ["momentum", "16"]]
    few, many = (dict(zip(titles, row, strict=True)) for row in rows)
    assert "±" in few["K=2"]
    assert few["K=2, plain"] == ""
    assert few["K=2, rank 4 at once"] == many["K=2, rank 4 at once"]
    capsys.readouterr()
    assert replicas.main(config)["runs"] == runs
    assert "test_loss" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="has runs of 20 steps, not of 30"):
        replicas.main(dataclasses.replace(config, steps=30))


@pytest.mark.full
def test_codecs_are_compared_at_both_widths(config, monkeypatch):
    here.limit_devices(monkeypatch)
    names = tuple(
        f"K={width}, {codec}" for codec in ("bf16", "fp4") for width in (1, 2)
    )
    config = dataclasses.replace(config, codecs=True, methods=names, seeds=(0,))
    titles, none, *rows = replicas.codec_rows(replicas.main(config))
    assert titles[2:] == ["momentum, K=1", "momentum, K=2"]
    assert none == ["none", "4", "+0.0000", ""]
    sizes = {row[0]: float(row[1]) for row in rows}
    assert sizes["bf16"] == 2
    assert 0.6 < sizes["fp4"] < 0.7
    assert all(float(cell) < 0.2 for row in rows for cell in row[2:])


def test_bytes_of_a_codec_are_counted_in_its_payload():
    assert bytes_of("int8", ((16, 16), (256,))) == 2 * (256 + 4)
    # Two matrices of 16 x 1, and a vector that is sent as it is.
    assert bytes_of("PowerSGD 1, fed back", ((16, 16), (256,))) == 4 * (32 + 256)


TINY = model.Config(
    layers=2, features=16, heads=2, vocabulary=65, context=8, dropout=0.2
)


@pytest.mark.full
def test_simulated_replicas_have_keys_of_their_own():
    """Dropout on four devices and on four simulated replicas drops the same."""
    graph, params = model.init(TINY, 0)
    loss, key = model.loss_with_dropout(graph), jax.random.key(1)
    tokens = np.random.default_rng(0).integers(65, size=(4, 8, 9)).astype(np.int32)

    def made(devices):
        mesh = pj.data_mesh(devices)
        return pj.make_train_step(loss, OPTIMIZERS["momentum"], mesh=mesh)

    train = made(4)
    state, losses = train.init(params, rng=key), []
    for batch in tokens:
        state, info = train.step(state, batch)
        losses.append(float(info.loss))
    step = Simulated(made(1), 4)
    _, found = step.run(step.init(params, key), iter(tokens), len(tokens))
    np.testing.assert_allclose(found, losses, rtol=1e-5)


@pytest.mark.full
def test_nanogpt_repeats_no_run(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(map(chr, range(65, 130))) * 20)
    config = nanogpt.Config(
        text,
        methods=("K=1", "K=2"),
        replicas=(2, 4),
        seeds=(0,),
        steps=4,
        batch=8,
        every=2,
        sizes=TINY,
        out=tmp_path / "out.json",
    )
    cells = nanogpt.main(config)
    counts = [(cell["method"], cell["replicas"]) for cell in cells]
    assert counts == [("K=1", 2), ("K=2", 2), ("K=2", 4)]
    assert all(cell["best"] == min(cell["losses"]) < 4.3 for cell in cells)
    capsys.readouterr()
    assert nanogpt.main(dataclasses.replace(config, minutes=0)) == cells
    assert not capsys.readouterr().out


@pytest.mark.full
def test_runs_on_devices_equal_simulated_runs(config, monkeypatch):
    here.limit_devices(monkeypatch)
    task = replicas.task_of(config)
    run = _runs.key("digits", "momentum", 0.1, "K=2", 4, 0)
    wanted = _runs.train(task, run)
    monkeypatch.setattr(_runs, "ON_DEVICES", ("digits",))
    found = _runs.train(task, run)
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=1e-3)
    np.testing.assert_allclose(found["test_loss"], wanted["test_loss"], rtol=1e-3)


def test_methods_of_the_cluster_have_display_names():
    assert set(cluster.METHODS) <= NAMES.keys()


def test_shown_rows_have_three_seeds():
    def runs(method, replicas, loss, seeds):
        common = {"task": "mnist", "optimizer": "adamw", "rate": 0.1, "method": method}
        return [
            common | {"replicas": replicas, "seed": s, "test_loss": loss + s}
            for s in seeds
        ]

    every = range(3)
    found = [
        *runs("K=1", 1, 0.5, every),
        *runs("K=2", 4, 0.6, every),
        *runs("K=2", 16, 0.6, range(2)),
        *runs("K=2, rank 16 at once", 4, 0.5, every),
    ]
    result = {"task": "mnist", "seeds": [*every], "runs": found}
    _, *rows = _table.shown_rows([result])
    assert rows == [
        ["mnist", "adamw", "4", "1.5000", "+0.1000 ± 0.0000", "+0.0000 ± 0.0000"]
    ]


def test_picture_of_committed_results_is_drawn(tmp_path):
    path = tmp_path / "replicas.png"
    picture.picture(_table.committed(), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_diverged_run_is_drawn_at_the_top():
    ended, lost = {"test_loss": 0.1}, {"test_loss": None}
    assert picture.height([[ended, ended], [ended, lost]]) == (picture.WORST, 0)
    assert picture.height([[ended, {"test_loss": 0.2}]] * 2) == pytest.approx((0.1, 0))
