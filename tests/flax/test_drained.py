"""Tests that a state is written back to a model only once nothing is in flight."""

import optax
import pytest

import pipejax as pj
from pipejax.flax._drained import check_drained

from ..helpers import batches, init_params, loss_fn


def test_gradients_in_flight_are_counted_and_refused():
    """At width 3, one gradient is in flight after a step, and two after the second."""
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2), width=3)
    state = train.init(init_params())
    check_drained(state)
    for waiting, batch in zip((1, 2, 2), batches(3), strict=True):
        state, _ = train.step(state, batch)
        with pytest.raises(
            ValueError, match=f"`state` must .*, got {waiting} computed"
        ):
            check_drained(state)
    state, _ = train.drain(state)
    check_drained(state)
