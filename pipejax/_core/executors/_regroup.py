"""Moves a state of local steps to another number of groups.

The groups that there were exchange everything that they have changed, as in a drain.
The new groups begin at the anchor, with the model state that all agree on. Each has the
mean of the inner optimizers' states, the counters and keys of the first group, and the
greatest number of skipped steps.

During the conversion, every new group holds what all old groups have of their own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Reduced
from pipejax._core.rounds import (
    Arrival,
    Chunk,
    ChunkState,
    GroupModel,
    GroupState,
    LocalState,
    Position,
    RoundPassengers,
    Shared,
    agreed_on,
    arrived,
    at_agreed,
    changes_of,
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
    like = RoundPassengers(report, state.own.sent.changes)
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
    form, local, reports = shared.form, own.local, []
    whole = GroupModel(local.trainable.params, local.model_state)
    models = [_row(whole, i) for i in range(groups)]

    def by_group(x: jax.Array) -> jax.Array:
        return x.reshape(groups, x.shape[0] // groups, *x.shape[1:])

    if left:
        buffer, sent = jax.tree.map(by_group, (own.buffer, own.sent))
        first = config.chunks - left
        shared, models, arrival = _exchanged(
            config, shared, models, buffer, sent, first
        )
        reports.append(arrival)
    if taken:
        moved = [differences(form, shared.anchor, model.params) for model in models]
        changes = [
            changes_of(form, model.model_state, shared.model_state) for model in models
        ]
        report = jax.tree.map(lambda x: by_group(x) / taken, own.reported)
        sent = RoundPassengers(report, _rows(changes))
        shared, models, arrival = _exchanged(
            config, shared, models, _rows(moved), sent, 0
        )
        reports.append(arrival)
    opt_state = jax.tree.map(_mean, local.trainable.opt_state)
    model_state = at_agreed(form, models[0].model_state, shared.model_state)
    rng, step = _row((local.rng, local.step), 0)
    trainable = local.trainable._replace(
        params=form.whole(shared.anchor), opt_state=opt_state
    )
    common = Common(trainable, model_state, rng, local.skipped.max(), step)
    return shared._replace(model_state=model_state), common, tuple(reports)


def _exchanged(
    config: RoundConfig,
    shared: Shared,
    models: list[GroupModel],
    buffer: Chunks,
    sent: RoundPassengers,
    first: int,
) -> tuple[Shared, list[GroupModel], Arrival]:
    """Exchanges the chunks from `first` on, and merges all groups.

    `buffer` and `sent` have a leading axis of groups.
    """
    groups, form, spec = len(models), shared.form, config.chunk_spec
    anchor, outer, moved = map(list, (shared.anchor, shared.outer, buffer))
    refused, total = shared.refused, _total(sent)
    for number in range(first, config.chunks):
        split = (P(None, *spec),) * len(buffer[number]) if spec else ()
        chunk = constrained(buffer[number], split)
        carried = total if number + 1 == config.chunks else None
        message = config.message(_total(chunk), carried, form)
        reduced = Reduced.of(message, jnp.array(True))
        due = ChunkState(anchor[number], outer[number], refused, chunk, ())
        after = _arrived(config, due, reduced, groups)
        anchor[number], outer[number], refused, moved[number], _ = after
    found = []
    for i, model in enumerate(models):
        params = merged(form, model.params, _row(moved, i))
        own = model.model_state, _row(sent.changes, i)
        agreed, state = agreed_on(shared.model_state, *own, reduced, groups)
        found.append(GroupModel(params, state))
    values = reduced.sum.passengers.values
    arrival = config.arrival(values, _row(sent.report, 0), refused, groups)
    shared = Shared(tuple(anchor), tuple(outer), agreed, refused, form)
    return shared, found, arrival


def _arrived(
    config: RoundConfig, due: ChunkState, reduced: Reduced, groups: int
) -> ChunkState:
    """Returns a chunk that has arrived, with the corrections of all groups."""

    def of_group(own: Chunk) -> ChunkState:
        one = due._replace(buffer=own)
        return arrived(config.outer_tx, one, reduced, (), groups)

    whole: Any = None
    axes = ChunkState(whole, whole, whole, whole, whole)._asdict() | {"buffer": 0}
    return jax.vmap(of_group, out_axes=ChunkState(**axes))(due.buffer)


def _total(tree: Tree) -> Any:
    return jax.tree.map(lambda x: x.sum(0), tree)


def _row(tree: Tree, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], tree)


def _rows(trees: list[Tree]) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def _mean(x: jax.Array) -> jax.Array:
    """Returns the mean over groups; the first where all are equal, and of counters."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[0]
    wide = x if jnp.iscomplexobj(x) else x.astype(working_dtype(x.dtype))
    return jnp.where((x == x[:1]).all(0), x[0], wide.mean(0).astype(x.dtype))
