r"""A round of local steps, as pure functions of one group.

Group i has parameters `theta_i` and an inner optimizer of its own. All groups have the
same anchor a. A round has H steps. At its end, group i takes its difference

$$D_i = a - \theta_i$$

In each of the next V steps, one of V chunks of it is averaged over groups, and the
outer optimizer u applies the mean to that chunk of the anchor:

$$a' = a - u(1/p \sum_i D_i)$$

When the last chunk has arrived, the progress that was made meanwhile is kept:

$$\theta_i <- \theta_i + (a' - (a - D_i))$$
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from pipejax._core.message import (
    Exchange,
    InFlight,
    Message,
    Reduced,
    averaging,
)
from pipejax._core.step import Common, Inputs, Step, StepInfo, apply
from pipejax._internal.mesh import AxisName
from pipejax.collectives import AllReduce

from ._flat import Flat, chunk_of, chunked, whole, with_chunk
from ._state import GroupState, Shared


def inner_step(
    step: Step, local: Common, inputs: Inputs
) -> tuple[Common, StepInfo, Message]:
    """Takes a step of one group alone, with its own gradient."""
    nothing = InFlight((), jnp.zeros(1, jnp.int32), {})
    message, computed = step.compute(local, nothing, inputs)
    reduced = Reduced.of(message, jnp.array(True))
    local, info = apply(step.settings, local, computed, reduced, alone=True)
    return local, info, message


def begun(shared: Shared, own: GroupState, chunks: int) -> GroupState:
    """Returns the state with the difference of a round that has ended."""
    params = chunked(own.local.trainable.params, chunks)
    buffer = jax.tree.map(jnp.subtract, shared.anchor, params)
    now, _ = own.reported
    empty = jax.tree.map(jnp.zeros_like, now)
    return own._replace(buffer=buffer, reported=(empty, now))


def exchange(
    own: GroupState,
    number: jax.Array,
    all_reduce: AllReduce,
    axis_name: AxisName,
) -> Exchange:
    """Returns the exchange of one chunk."""
    chunk = chunk_of(own.buffer, number)
    message = Message(chunk, None, own.reported[1])
    return averaging(message, jnp.array(True), all_reduce, axis_name)


def arrived(
    outer_tx: optax.GradientTransformation,
    shared: Shared,
    own: GroupState,
    number: jax.Array,
    reduced: Reduced,
    groups: int,
) -> tuple[Shared, GroupState]:
    """Applies the mean of a chunk to the anchor, and leaves the correction.

    A chunk that is not finite is left out by all groups alike: it moves nothing, and
    its difference stays for the next round.
    """
    mean = jax.tree.map(lambda x: x / groups, reduced.sum.gradients)
    before, sent = chunk_of(shared.anchor, number), chunk_of(own.buffer, number)
    state = _of_chunk(shared.outer, shared.anchor, number)
    updates, new = outer_tx.update(mean, state, before)
    after = optax.apply_updates(before, updates)
    keep = reduced.finite
    after = jax.tree.map(lambda a, b: jnp.where(keep, a, b), after, before)
    new = jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, state)
    correction = jax.tree.map(
        lambda a, b, d: jnp.where(keep, a - (b - d), 0), after, before, sent
    )
    last = number == next(iter(shared.anchor.values())).shape[0] - 1
    shared = shared._replace(
        anchor=with_chunk(shared.anchor, number, after),
        outer=_with_chunk(shared.outer, new, shared.anchor, number, last),
    )
    return shared, own._replace(buffer=with_chunk(own.buffer, number, correction))


def merged(own: GroupState) -> GroupState:
    """Returns the state after a group has moved by the corrections of a round."""
    params = own.local.trainable.params
    corrections = whole(own.buffer, params)
    return _with_params(own, jax.tree.map(jnp.add, params, corrections))


def at_anchor(shared: Shared, own: GroupState) -> GroupState:
    """Returns the state of a group that has the parameters of the anchor."""
    return _with_params(own, shared.params)


def _with_params(own: GroupState, params: optax.Params) -> GroupState:
    trained = own.local.trainable._replace(params=params)
    return own._replace(local=own.local._replace(trainable=trained))


def reporting(own: GroupState, message: Message, sync_every: int) -> GroupState:
    """Returns the state with what a step reports added to its round."""
    now, exchanged = own.reported
    if message.passengers.names != now.names:
        raise ValueError(
            "`batch` must be given to `train.init` when `loss_fn` returns metrics or a"
            f" weight; got {message.passengers.names[1:]} for which the state has no"
            " room. Call `train.init(params, ..., batch=batch)`, with arrays or their"
            " shapes, jax.ShapeDtypeStruct."
        )
    values = now.values + message.passengers.values / sync_every
    now = dataclasses.replace(now, values=values)
    return own._replace(reported=(now, exchanged))


def _of_chunk(outer: optax.OptState, anchor: Flat, number: jax.Array) -> Any:
    """Returns the optimizer's state of one chunk."""
    return jax.tree.map(
        lambda x: (
            lax.dynamic_index_in_dim(x, number, 0, keepdims=False)
            if _is_chunked(x, anchor)
            else x
        ),
        outer,
    )


def _with_chunk(
    outer: optax.OptState, new: Any, anchor: Flat, number: jax.Array, last: jax.Array
) -> Any:
    """Returns the state with that of a chunk; counters advance with the last one."""

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        if _is_chunked(x, anchor):
            return lax.dynamic_update_index_in_dim(x, y, number, 0)
        return jnp.where(last, y, x)

    return jax.tree.map(one, outer, new)


def _is_chunked(x: Any, anchor: Flat) -> bool:
    return any(x.shape == rows.shape for rows in anchor.values())
