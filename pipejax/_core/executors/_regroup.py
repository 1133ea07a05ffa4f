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
    ChunkState,
    GroupState,
    LocalState,
    Position,
    RoundPassengers,
    Shared,
    agreed_on,
    arrived,
    at_agreed,
    change,
    changes_of,
    difference,
    mean_of_groups,
    moved,
    points_of,
    refused_after,
)
from pipejax._core.step import Common
from pipejax._internal.ranges import sum_dtype
from pipejax._internal.shards import constrained
from pipejax._internal.structures import merged
from pipejax._internal.types import Tree

from ._initial_rounds import initial_rounds
from ._round_config import RoundConfig


def regrouped(
    config: RoundConfig, reduction_mesh: Mesh, state: LocalState, before: int
) -> tuple[LocalState, tuple[Arrival, ...]]:
    """Returns a drained state of the groups of `config`, and the reports of rounds.

    In `state`, every new group has the arrays of all `before` groups.
    """
    steps = int(state.position.reported)
    local = functools.partial(_drained, config, before, steps)
    whole: Any = P()
    program = config.inner.on_mesh(local, whole, whole)
    form: Any = jax.eval_shape(program, state.shared, state.own)
    report = jax.eval_shape(lambda x: x, state.own.reported)
    report = jax.tree.map(lambda x: x.update(shape=(x.shape[0] // before,)), report)
    like = RoundPassengers(report, _averaged(state.shared))
    args = config, reduction_mesh, state.shared.form.schedule
    shapes = initial_rounds(*args, form[1], like, abstract=True)
    places = jax.tree.map(lambda x: x.sharding, shapes.shared)
    found = jax.jit(program, out_shardings=(places, None, None))
    shared, common, reports = found(state.shared, state.own)
    new = initial_rounds(*args, common, like)
    position = Position.at(0, 0, int(state.position.warmup))
    return LocalState(shared, new.own, position), reports


def _averaged(shared: Shared) -> Any:
    """Returns the model state with `None` for each leaf that rounds do not average."""
    flags = shared.form.averages(shared.model_state)
    return jax.tree.map(lambda x, flag: x if flag else None, shared.model_state, flags)


def _drained(
    config: RoundConfig, groups: int, steps: int, shared: Shared, own: GroupState
) -> tuple[Shared, Common, tuple[Arrival, ...]]:
    """Returns what is the same on all groups after a drain, on one new group."""
    form, local, reports = shared.form, own.local, []
    if steps:

        def of_group(x: jax.Array) -> jax.Array:
            return x.reshape(groups, x.shape[0] // groups, *x.shape[1:]) / steps

        means = jax.tree.map(of_group, own.reported)
        states = [_row(local.model_state, i) for i in range(groups)]
        changes = [changes_of(form, each, shared.model_state) for each in states]
        sent = [RoundPassengers(_row(means, i), changes[i]) for i in range(groups)]
        shared, arrival = _exchanged(config, shared, local, sent)
        reports = [arrival]
    before, opt_state = mean_of_groups(
        (local.trainable.params, local.trainable.opt_state)
    )
    params = form.whole(shared.anchor)
    points = points_of(config.inner.step.settings.tx, form, opt_state)
    opt_state = merged(moved(points, params, change(before, params)), opt_state)
    rng, step, own_state = _row((local.rng, local.step, local.model_state), 0)
    model_state = at_agreed(form, own_state, shared.model_state)
    trainable = local.trainable._replace(params=params, opt_state=opt_state)
    common = Common(trainable, model_state, rng, local.skipped.max(), step)
    return shared._replace(model_state=model_state), common, tuple(reports)


def _exchanged(
    config: RoundConfig, shared: Shared, local: Common, sent: list[RoundPassengers]
) -> tuple[Shared, Arrival]:
    """Exchanges all chunks, with what travels with the last one of each group."""
    groups, form, spec = len(sent), shared.form, config.chunk_spec
    anchors, outers, refused = [], [], shared.refused
    total = _total(_rows(sent))
    params = [_row(local.trainable.params, i) for i in range(groups)]
    for number, (anchor, outer) in enumerate(
        zip(shared.anchor, shared.outer, strict=True)
    ):
        chunk = _rows([difference(form, anchor, each, number) for each in params])
        chunk = constrained(chunk, (P(None, *spec),) * len(chunk) if spec else ())
        last = number + 1 == form.chunks
        message = config.message(_total(chunk), total if last else None, form)
        reduced = Reduced.of(message, jnp.array(True))
        due = ChunkState(anchor, outer, ())
        # The correction of a group is not needed: all begin anew at the anchor.
        args = due, message.gradients, reduced, groups, reduced.finite
        trained = config.trained(params[0], form, number)
        due, _ = arrived(config.outer_tx, *args, trained)
        anchors.append(due.anchor)
        outers.append(due.outer)
        refused = refused_after(refused, reduced)
    own = _row(local.model_state, 0), sent[0].changes
    agreed, _ = agreed_on(shared.model_state, *own, reduced, groups)
    values = reduced.sum.passengers.values
    arrival = config.arrival(values, sent[0].report, refused, groups)
    return Shared(tuple(anchors), tuple(outers), agreed, refused, form), arrival


def _total(tree: Tree) -> Any:
    return jax.tree.map(lambda x: x.astype(sum_dtype(x.dtype)).sum(0), tree)


def _row(tree: Tree, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], tree)


def _rows(trees: list[Tree]) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)
