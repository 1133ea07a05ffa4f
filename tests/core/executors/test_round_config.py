"""Tests the work of one group in a round, from its arrays alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pipejax as pj
from pipejax._core.executors._round_config import Reads, StepKind, alone, stacked
from pipejax._core.message import Message, Reduced
from pipejax._core.rounds import ChunkState, Form

from ...helpers import loss_fn


def rounds():
    train = pj.make_local_step(
        loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2), sync_every=2, overlap_steps=2
    )
    return train.rounds.config


def test_axis_of_groups_is_added_and_taken_away():
    tree = {"a": jnp.arange(3.0), "b": jnp.float32(2)}
    assert jax.tree.map(jnp.shape, stacked(tree)) == {"a": (1, 3), "b": (1,)}
    assert jax.tree.map(np.array_equal, alone(stacked(tree)), tree) == {
        "a": True,
        "b": True,
    }


def test_last_chunk_moves_a_group_and_the_next_round_begins_there():
    """The group sent 1 of a mean of 2, and has moved to 0 since."""
    anchor, difference = {"float32": jnp.array([4.0])}, {"float32": jnp.array([3.0])}
    outer = optax.sgd(1.0).init(anchor)
    due = ChunkState(anchor, outer, jnp.int32(0), difference, {})
    correction = {"float32": jnp.array([0.5])}
    form = Form.of(jnp.zeros(2), (), pj.data_mesh(2), "data")
    reads = Reads((correction,), ({"float32": jnp.array([7.0])},), None, form)
    total = Message({"float32": jnp.array([3.0 + 1.0])}, None, None)
    summed = Reduced.of(total, jnp.array(True)), {}
    kind = StepKind(exchanges=True, merges=False, begins=True)
    params = stacked(jnp.array([5.0, 0.0]))
    outcome = rounds().after(kind, params, due, reads, summed)
    assert outcome.due.anchor["float32"] == 2
    assert outcome.due.buffer["float32"] == 2 - (4 - 3)
    assert outcome.arrival is None
    first, last = outcome.buffer
    assert (first["float32"].tolist(), last["float32"].tolist()) == ([2.0], [2.0])
