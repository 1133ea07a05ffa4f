"""Moves a state of local steps to another number of groups.

The groups that there were exchange everything that they have changed, as in a drain.
The new groups begin at the anchor. Each has the mean of the inner optimizers' states
and of the model states of all old groups, and their first counters and keys.

During the conversion, every new group holds what all old groups have of their own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Passengers, Reduced
from pipejax._core.rounds import (
    Arrival,
    Chunk,
    ChunkState,
    GroupState,
    LocalState,
    Position,
    Sent,
    Shared,
    arrived,
    differences,
    merged,
)
from pipejax._core.step import Common
from pipejax._internal.ravel import working_dtype
from pipejax._internal.shards import constrained
from pipejax._internal.types import Tree

from ._initial_rounds import initial_rounds
from ._round_config import RoundConfig

Chunks = tuple[Chunk, ...]
"""Chunks of all groups, with a leading axis of groups."""


def regrouped(
    config: RoundConfig, reduction_mesh: Mesh, state: LocalState, before: int
) -> tuple[LocalState, tuple[Arrival, ...]]:
    """Returns a drained state of the groups of `config`, and the reports of rounds.

    In `state`, every new group has the arrays of all `before` groups.
    """
    taken, left, _ = map(int, state.position)
    local = functools.partial(_drained, config, before, taken, left)
    whole: Any = P()
    program = config.inner.on_mesh(local, whole, whole)
    form: Any = jax.eval_shape(program, state.shared, state.own)
    report = jax.eval_shape(lambda x: x, state.own.reported)
    report = jax.tree.map(lambda x: x.update(shape=(x.shape[0] // before,)), report)
    like = Sent(report, state.own.sent.changes)
    shapes = initial_rounds(config, reduction_mesh, form[1], like, abstract=True)
    places = jax.tree.map(lambda x: x.sharding, shapes.shared)
    found = jax.jit(program, out_shardings=(places, None, None))
    shared, common, reports = found(state.shared, state.own)
    new = initial_rounds(config, reduction_mesh, common, like)
    position = Position.at(0, 0, int(state.position.warmup))
    return LocalState(shared, new.own, position), reports


def _drained(
    config: RoundConfig,
    groups: int,
    taken: int,
    left: int,
    shared: Shared,
    own: GroupState,
) -> tuple[Shared, Common, tuple[Arrival, ...]]:
    """Returns what is the same on all groups after a drain, on one new group."""
    form, params = shared.form, own.local.trainable.params
    reports: tuple[Arrival, ...] = ()
    every = range(groups)

    def row(tree: Tree, i: int) -> Any:
        return jax.tree.map(lambda x: x[i], tree)

    def by_group(x: jax.Array) -> jax.Array:
        return x.reshape(groups, -1)

    def report(sent: Passengers, steps: int) -> Arrival:
        total = by_group(sent.values).sum(0) / steps
        return config.arrival(total, sent, shared.refused, groups)

    held = [row(params, i) for i in every]
    if left:
        buffer = jax.tree.map(by_group, own.buffer)
        first = config.chunks - left
        shared, moved = _exchanged(config, shared, buffer, first, groups)
        held = [merged(form, held[i], row(moved, i)) for i in every]
        reports += (report(own.sent.report, 1),)
    if taken:
        found = [differences(form, shared.anchor, params) for params in held]
        buffer = jax.tree.map(lambda *x: jnp.stack(x), *found)
        shared, _ = _exchanged(config, shared, buffer, 0, groups)
        reports += (report(own.reported, taken),)
    local = own.local
    rest = local.trainable.opt_state, local.model_state
    opt_state, model_state = jax.tree.map(_mean, rest)
    rng, step = row((local.rng, local.step), 0)
    trainable = local.trainable._replace(
        params=form.whole(shared.anchor), opt_state=opt_state
    )
    common = Common(trainable, model_state, rng, local.skipped.max(), step)
    return shared._replace(model_state=model_state), common, reports


def _exchanged(
    config: RoundConfig, shared: Shared, sent: Chunks, first: int, groups: int
) -> tuple[Shared, Chunks]:
    """Returns what is shared after the exchange of chunks, and all corrections."""
    corrections = list(sent)
    for number in range(first, config.chunks):
        chunk = sent[number]
        if config.chunk_spec:
            chunk = constrained(chunk, (P(None, *config.chunk_spec),) * len(chunk))
        total = jax.tree.map(lambda x: x.sum(0), chunk)
        message = config.message(total, None, shared.form)
        reduced = Reduced.of(message, jnp.array(True))
        due = ChunkState(
            shared.anchor[number], shared.outer[number], shared.refused, chunk, ()
        )

        def of_group(own: Chunk, due: Any = due, reduced: Any = reduced) -> Any:
            due = due._replace(buffer=own)
            return arrived(config.outer_tx, due, reduced, (), groups)

        nothing: Any = None
        every: Any = ChunkState(nothing, nothing, nothing, nothing, nothing)
        every = every._replace(buffer=0)
        after = jax.vmap(of_group, out_axes=every)(chunk)
        anchor, outer = list(shared.anchor), list(shared.outer)
        anchor[number], outer[number] = after.anchor, after.outer
        corrections[number] = after.buffer
        shared = shared._replace(
            anchor=tuple(anchor), outer=tuple(outer), refused=after.refused
        )
    return shared, tuple(corrections)


def _mean(x: jax.Array) -> jax.Array:
    """Returns the mean over groups, or the first of counters and keys."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[0]
    if jnp.iscomplexobj(x):
        return x.mean(0)
    return x.astype(working_dtype(x.dtype)).mean(0).astype(x.dtype)
