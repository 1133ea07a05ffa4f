"""Tests that a batch is skipped whole if a part of its gradients is sent at once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj

from ...grid import each
from ...helpers import assert_bits_equal, batches, init_params, loss_fn
from .test_at_once import make


def sums_new(params, batch, *, model_state):
    """A loss whose model state is the sum of all numbers `new` so far."""
    return loss_fn(params, batch), pj.Aux(model_state=model_state + batch["new"].sum())


def with_new(count):
    return [x | {"new": np.ones(len(x["x"]), np.float32)} for x in batches(count)]


def points_of(data, **settings):
    """Returns parameters and model state after every step."""
    train, points = make(optax.sgd(0.1), loss=sums_new, **settings), []
    state = train.init(init_params(), model_state=jnp.zeros(()), batch=data[0])
    for batch in data:
        state, _ = train.step(state, batch)
        points.append(jax.device_get((state.params, state.model_state)))
    return points


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_batch_with_nan_is_skipped_and_forgotten(executor):
    data = batches(6)
    data[2]["x"][0, 0] = np.nan
    train, skipped = make(executor=executor), []
    state = train.init(init_params())
    for batch in data:
        state, info = train.step(state, batch)
        skipped.append(int(info.skipped))
    # Both parts of the gradient are skipped, in this step and in the next.
    assert skipped == [0, 0, 1, 2, 2, 2]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    assert len(set(pj.replica_digest(state).values())) == 1


@pytest.mark.parametrize("executor", each(["fused", "host"], full=["host"]))
@pytest.mark.parametrize(
    "settings",
    [{}, {"at_once": None, "delayed": {"hidden": True, "bias": False, "out": True}}],
)
def test_infinite_model_state_skips_both_parts(settings, executor):
    """A gradient that is not finite also skips both parts."""
    settings = {"executor": executor, "weight_prediction": False} | settings

    def run(name, value):
        data = with_new(5)
        data[2][name][0] = value
        return points_of(data, **settings)

    assert_bits_equal(run("new", np.inf), run("x", np.nan))


def test_infinite_changes_leave_gradients_alone_if_nothing_is_skipped():
    def run(value):
        data = with_new(4)
        data[1]["new"][0] = value
        return [params for params, _ in points_of(data, skip_nonfinite=False)]

    assert_bits_equal(run(np.inf), run(1.0))
