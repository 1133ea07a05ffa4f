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


@pytest.mark.parametrize("overlap", [1, 2])
def test_changes_of_groups_are_refused_before_their_exchange(overlap):
    train = pj.make_local_step(
        loss_fn,
        optax.sgd(0.1),
        mesh=pj.data_mesh(2),
        sync_every=2,
        overlap_steps=overlap,
        warmup_steps=1,
    )
    state = train.init(init_params())
    # The third step brings the report of the second, and the fourth brings none.
    for steps, batch in zip((0, 1, 1, 2), batches(4), strict=True):
        state, _ = train.step(state, batch)
        if not steps:
            check_drained(state)
            continue
        message = (
            rf"`state` must .* got one with {steps} steps .*train\.drain\(state\)`"
        )
        with pytest.raises(ValueError, match=message):
            check_drained(state)
    state, _ = train.drain(state)
    check_drained(state)


def test_round_without_overlap_leaves_nothing_to_exchange():
    mesh, tx = pj.data_mesh(2), optax.sgd(0.1)
    train = pj.make_local_step(loss_fn, tx, mesh=mesh, sync_every=2, overlap_steps=0)
    state, (first, second) = train.init(init_params()), batches(2)
    state, _ = train.step(state, first)
    with pytest.raises(ValueError, match="got one with 1 steps"):
        check_drained(state)
    state, _ = train.step(state, second)
    check_drained(state)
