"""Tests which place in a round a state of local steps has."""

import optax
import pytest

import pipejax as pj

from ...helpers import batches, init_params, loss_fn


@pytest.mark.parametrize(
    ("every", "overlap", "places"),
    [
        (3, 3, [(1, 1), (2, 2), (0, 1), (1, 2), (2, 3), (0, 1)]),
        (3, 1, [(1, 1), (2, 2), (0, 1), (1, 2), (2, 3), (0, 1)]),
        (1, 1, [(0, 1), (0, 1), (0, 1), (0, 1), (0, 1), (0, 1)]),
        (2, 0, [(1, 1), (0, 0), (1, 1), (0, 0), (1, 1), (0, 0)]),
    ],
)
def test_position_counts_steps_taken_and_steps_to_report(every, overlap, places):
    train = pj.make_local_step(
        loss_fn,
        optax.sgd(0.1),
        mesh=pj.data_mesh(2),
        sync_every=every,
        overlap_steps=overlap,
    )
    state, found = train.init(init_params()), []
    for batch in batches(6):
        state, _ = train.step(state, batch)
        found.append(tuple(map(int, state.position[:2])))
    assert found == places
    assert tuple(train.drain(state)[0].position) == (0, 0, 0)
