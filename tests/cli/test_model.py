"""Tests what the function of `--model` must return, and how a model is described."""

import jax
import jax.numpy as jnp
import optax
import pytest

import pipejax as pj
from pipejax import timing
from pipejax.cli._model import Model, load_step, twin_of
from pipejax.cli._usage import UsageError
from pipejax.overlap import Measurement, measure

from .test_calibrate import MODEL


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "described_model.py"
    path.write_text(MODEL)
    return str(path)


def test_model_has_size_compute_and_batch_of_a_measurement(path):
    program = load_step(f"{path}:step", pj.data_mesh(4))
    model = Model.of(program, Measurement((0.1, 0.2, 0.3), (0, 0, 0), (1, 1, 1)))
    assert model[:3] == (16 * 3, 200.0, 64 // 4)
    assert str(model) == "--parameters 48 --compute-ms 200.000 --batch 16"
    assert str(Model(48, 2.5)) == "--parameters 48 --compute-ms 2.500"


def test_twin_computes_no_predictions(path):
    program = load_step(f"{path}:step", pj.data_mesh(4))
    twin = twin_of(program)
    assert twin.train.width == 1
    assert twin_of(twin) is None
    times = measure(*twin, rounds=2, steps=1)
    assert min(times.compute) > 0


CLUSTER = timing.Cluster(
    2, timing.Link(0.0, 1e9), devices=2, inner=timing.Link(0.0, 1e9)
)


@pytest.mark.parametrize(
    ("ahead", "averages", "update"),
    [(20.0, False, 20.0), (20.0, True, 16.0), (2.0, True, 0.0), (500.0, False, 100.0)],
)
def test_prediction_repeats_the_update(ahead, averages, update):
    """A mean inside hosts of a million float32 numbers takes 4 ms."""
    model = Model(10**6, 100.0, None, ahead, averages)
    found = model.times(CLUSTER)
    assert 1e3 * found.update == pytest.approx(update)
    assert 1e3 * found.total == pytest.approx(100.0)


def test_shared_input_is_the_fourth_element(path, monkeypatch):
    program = load_step(f"{path}:step", pj.data_mesh(4))
    assert program.shared is None
    given = lambda _: lambda mesh: (*program[:3], 2.0)  # noqa: E731
    monkeypatch.setattr("pipejax.cli._model.load", given)
    assert load_step("any", pj.data_mesh(4)) == (*program[:3], 2.0)


def test_local_step_is_a_model(monkeypatch):
    def example(mesh):
        train = pj.make_local_step(
            lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1), mesh=mesh, sync_every=2
        )
        return train, train.init(jnp.ones((3, 2))), jnp.ones((8, 3))

    monkeypatch.setattr("pipejax.cli._model.load", lambda _: example)
    program = load_step("any", pj.data_mesh(4))
    times = measure(*program, rounds=2, steps=1)
    model = Model.of(program, times)
    assert (model.elements, model.batch) == (6, 2)
    assert model.compute > 0


@pytest.mark.parametrize("function", ["shapes", "no_arrays"])
def test_model_without_a_train_step_and_arrays_is_refused(path, function):
    with pytest.raises(UsageError, match=r"must return \(train, state, batch\) with"):
        load_step(f"{path}:{function}", jax.make_mesh((1,), ("data",)))
