"""Tests the work of one group in a round, from its arrays alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pipejax as pj
from pipejax._core.executors._round_config import alone, stacked
from pipejax._core.executors._round_parts import RoundReads, SentChunk
from pipejax._core.message import Message, Passengers, Reduced
from pipejax._core.rounds import ChunkState, Form, RoundPassengers
from pipejax._core.step import Common, Trainable
from pipejax._internal.round_schedule import RoundSchedule

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


def test_last_chunk_moves_a_group_but_keeps_the_progress_since():
    """The group sent 1 of a mean of 2, and has moved on since."""
    anchor, difference = {"float32": jnp.array([4.0])}, {"float32": jnp.array([3.0])}
    outer = optax.sgd(1.0).init(anchor)
    due = ChunkState(anchor, outer, {})
    params = jnp.array([5.0, 0.0])
    opt_state = optax.sgd(0.1).init(params)
    trained = Common(Trainable(params, opt_state), jnp.float32(8), None, None, None)
    form = Form.of(trained, jnp.zeros(1), pj.data_mesh(2), "data", RoundSchedule(2, 2))
    report = Passengers.of(jnp.float32(4), None)
    sent = SentChunk(difference, RoundPassengers(report, jnp.array([1.5])))
    reads = RoundReads(np.int32(1), jnp.int32(0), np.int32(2), jnp.float32(6), form)
    total = Message({"float32": jnp.array([3.0 + 1.0])}, jnp.array([1.0]), report)
    reduced = Reduced.of(total, jnp.array(True))
    model = rounds().model_of(stacked(trained), form)
    outcome = rounds().after(model, due, sent, reads, reduced)
    assert outcome.due.anchor["float32"] == 2
    assert outcome.arrival.loss == 4 / 2
    # The group sent 1.5 of a mean of 0.5, and had gone on to 8.
    assert outcome.agreed == 6 + 0.5
    assert outcome.model.model_state == 8 + (6.5 - 7.5)
    assert alone(outcome.model).params.tolist() == [5, 0 + 2 - (4 - 3)]
