"""Tests that a change of the number of devices loses nothing that is in flight."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import collectives
from pipejax.checkpoint._reshard import reshard, shapes_on
from pipejax.checkpoint._spread import Spread

from ..helpers import batches
from .runs import ALL_REDUCES, RATE, moved, params, run, train_step, weighted


def test_gradient_with_nan_in_flight_is_skipped_on_other_devices():
    first, second = (
        train_step(collectives.psum(), 4, width=2),
        train_step(collectives.psum(), 2, width=2),
    )
    bad = batches(1, size=24)[0]
    bad["x"][0, 0] = np.nan
    state = run(first, first.init(params()), [*batches(2, size=24), bad])
    drained, _ = second.drain(moved(second, state))
    assert int(drained.skipped) == 1
    assert np.isfinite(drained.params["w"]).all()


def test_shapes_on_other_devices_equal_the_shapes_of_their_states():
    first, second = (
        train_step(ALL_REDUCES["two_shot"], devices, width=3) for devices in (4, 2)
    )
    wanted, like = (train.abstract_state(params()) for train in (first, second))
    wanted = wanted._replace(in_flight=wanted.in_flight._replace(codec_states={}))
    like = like._replace(in_flight=like.in_flight._replace(codec_states={}))
    found = shapes_on(second, like, Spread.of(wanted))
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)


def test_leaves_without_elements_are_resharded():
    def make(devices):
        def loss(params, batch):
            return (params["w"] * batch).mean()

        return pj.make_train_step(loss, optax.sgd(RATE), mesh=pj.data_mesh(devices))

    like = {"w": jnp.ones(()), "flat": jnp.zeros((0, 5)), "thin": jnp.zeros((5, 0))}
    first, second = make(4), make(2)
    state = run(first, first.init(like), [np.ones(8, np.float32)] * 2)
    state, _ = second.drain(moved(second, state))
    assert float(state.params["w"]) == 1 - 2 * RATE
    assert state.params["flat"].shape == (0, 5)
    assert state.params["thin"].shape == (5, 0)


@pytest.mark.parametrize("devices", [41, 47, 55, 61])
def test_queue_in_flight_stays_filled_on_any_devices(devices):
    """The float32 mean of 41 ones is below 1, and would be 0 as an integer."""
    train = train_step(collectives.psum(), 1, width=2)
    state = run(train, train.init(params()), batches(1, size=24))
    each = jax.tree.map(
        lambda x: jnp.concatenate([x] * devices),
        state.in_flight._replace(codec_states={}),
    )
    state = state._replace(in_flight=each)
    state = reshard(train, state, Spread.of(state))
    assert state.in_flight.filled.tolist() == [1]


def begun(train):
    """Returns a state with a gradient in flight, whose examples weigh 78."""
    batch = {"x": batches(1, size=12)[0]["x"], "n": np.arange(1.0, 13, dtype="f4")}
    return run(train, train.init(jnp.zeros(5), batch=batch), [batch])


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ((4,), (1,)),
        ((4,), (6,)),
        ((4, 2), (1,)),
        ((4, 2), (4,)),
        ((6,), (6, 3)),
        ((6, 3), (4, 2)),
        ((6, 3), (6, 2)),
        ((6, 2), (6,)),
    ],
)
def test_weights_equal_the_weight_of_the_batch_on_any_devices(before, now):
    """The devices of a host have one message, if there are hosts."""
    first, second = weighted(*before), weighted(*now)
    state = begun(first)
    wanted, (info,) = first.drain(state)
    drained, (found,) = second.drain(moved(second, state))
    np.testing.assert_allclose(drained.params, wanted.params, rtol=1e-5)
    np.testing.assert_allclose(found.loss, info.loss, rtol=1e-5)
    np.testing.assert_allclose([found.weight, info.weight], 78, rtol=1e-6)
