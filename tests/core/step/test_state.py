"""Tests the state as one pytree, and the part that all devices share."""

import jax
import optax

import pipejax as pj
from pipejax._core.step import (
    PipelineState,
    Trainable,
    common_of,
    state_of,
    without_trainable,
)
from pipejax._internal.shards import Shards

from ...helpers import init_params, loss_fn


def test_state_parts_are_properties():
    trained = Trainable("p", "o", "m", "g", "s", "d", "h")
    state = PipelineState(trained, *"nfrstc")
    assert (state.params, state.opt_state, state.mean) == ("p", "o", "m")
    assert (state.gathered, state.slopes, state.shards) == ("g", "s", "h")
    assert state.delayed_counters == "d"


def test_shared_part_leaves_out_queue_and_counter():
    """Each device has its own queue, and only the host counts calls."""
    state = PipelineState(Trainable("p", "o"), *"nfrstc")
    common = common_of(state)
    assert state_of(common, state.in_flight, state.calls) == state
    assert {*state._fields} - {*common._fields} == {"in_flight", "calls"}


def test_shards_are_kept_by_without_trainable():
    shards = Shards(data_axes=(0,))
    state = PipelineState(Trainable("p", "o", "m", shards=shards), *"nfrstc")
    found = without_trainable(state)
    assert found.trainable == Trainable(None, None, shards=shards)
    assert found.model_state == "n"


def test_arrays_in_a_state_have_their_documented_names():
    """A checkpoint finds the arrays by these names, without `trainable`."""
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2))
    paths = jax.tree_util.tree_leaves_with_path(train.init(init_params()))
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [
        ".trainable.params['bias']",
        ".trainable.params['hidden']",
        ".trainable.params['out']",
        ".in_flight.pending[0].gradients['bias']",
        ".in_flight.pending[0].gradients['hidden']",
        ".in_flight.pending[0].gradients['out']",
        ".in_flight.pending[0].passengers.values",
        ".in_flight.filled",
        ".skipped",
        ".step",
    ]
