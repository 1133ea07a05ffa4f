"""Divides a message into gradients that are delayed, and others exchanged at once.

`delayed` of `make_train_step` chooses parameters. Their gradients wait in the queue,
and the exchange of K-1 steps ago runs beside the compute. The gradients of all others
are exchanged in the step that computes them, as at width 1. The update is given one
tree, with the mean in flight of the one kind and the fresh mean of the other:

$$w_t = w_{t-1} - u(g_{t-K}^{delayed}, g_{t-1}^{at once})$$

Where one of the two has not arrived, or is not finite, its parameters and their part of
the optimizer's state stay as they are. This is so in the first K-1 steps for what is
delayed, and in a drain for what is not. In between, delayed parameters have had K-1
updates fewer than the others, which matters to an optimizer that counts: Adam divides
by what the count says, a schedule reads it, and `optax.MultiSteps` waits for it. So
leaves of the optimizer's state that belong to no parameter exist twice. The update runs
with each, and a parameter takes the result of its own kind. XLA leaves out the rest.

`at_once` of `make_train_step` divides every gradient. Let L be what a linear codec,
such as PowerSGD, keeps of the sum over devices. It is exchanged at once, in a few
bytes. The rest is delayed, and the update is given

$$w_t = w_{t-1} - u(L_{t-1} + (g - L)_{t-K})$$

Directions in which devices agree, among them those of large curvature, have no delay
then. Over a run, the sum of all gradients is that of synchronous training. A drain
applies what is left in K-1 updates of its own, so there are more updates than batches.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pipejax._core.message import (
    Message,
    Passengers,
    Reduced,
    is_finite,
    with_constraints,
)
from pipejax._core.prediction import Mean
from pipejax._internal.structures import like_optimizer, merged, no_leaf, of_leaves
from pipejax._internal.types import Tree

from ._state import Trainable
from ._step import Delayed, Settings


def delays(delayed: Delayed, params: optax.Params) -> Tree:
    """Returns for each parameter whether its gradient is delayed.

    Raises a `ValueError` unless `delayed` says so by bools, of which one is true.
    """
    chosen = delayed(params) if callable(delayed) else delayed
    if chosen is None:
        return jax.tree.map(lambda _: True, params)
    try:
        flags = jax.tree.broadcast(chosen, params)
    except ValueError as error:
        raise ValueError(
            "`delayed` must be a pytree of bools with the structure of `params` or the"
            f" beginning of it, got {jax.tree.structure(chosen)}: {error}. Pass a"
            " function of the parameters that returns such a tree."
        ) from error
    for path, flag in jax.tree_util.tree_leaves_with_path(flags):
        if not isinstance(flag, bool):
            raise ValueError(
                "`delayed` must hold bools, got"
                f" {flag!r} for params{jax.tree_util.keystr(path)}. True delays a"
                " gradient, and False exchanges it at once."
            )
    if not any(jax.tree.leaves(flags)):
        raise ValueError(
            "`delayed` must be true for at least one parameter, got none. For"
            " synchronous training, make the train step with width=1."
        )
    return flags


def parted(
    settings: Settings, params: optax.Params, message: Message
) -> tuple[Message, Message | None]:
    """Returns the part of a message that is delayed, and that exchanged at once.

    Metrics and changes of model state are delayed. Loss and weight go with both. If a
    codec is to be exchanged at once, both have all gradients, until `without`.
    """
    flags = delays(settings.delayed, params)
    if settings.at_once is not None:
        return message, _at_once(settings, message, message.gradients)
    if all(jax.tree.leaves(flags)):
        return message, None
    late = jax.tree.map(lambda flag, g: g if flag else None, flags, message.gradients)
    rest = jax.tree.map(lambda flag, g: None if flag else g, flags, message.gradients)
    if not jax.tree.leaves(late):
        raise ValueError(
            "`delayed` must be true for at least one parameter that `tx` trains, got"
            " only parameters whose updates are zero. For synchronous training, make"
            " the train step with width=1."
        )
    delayed = message._replace(gradients=late, shards=_shards_of(message, late))
    return delayed, _at_once(settings, message, rest)


def _at_once(settings: Settings, message: Message, gradients: optax.Updates) -> Message:
    passengers = message.passengers
    if settings.skip_nonfinite:
        gradients = _usable_if_changes_are(message, gradients)
    return Message(
        gradients=gradients,
        changes=no_leaf(message.changes),
        passengers=Passengers.of(passengers.loss, None, passengers.weight),
        shards=dataclasses.replace(_shards_of(message, gradients), changes=()),
    )


def _usable_if_changes_are(message: Message, gradients: optax.Updates) -> Any:
    """Returns gradients that are not finite if a change of the model state is not.

    Changes travel with what is delayed. If they are refused, no part of the batch is
    applied.
    """
    leaves, structure = jax.tree.flatten(gradients)
    sizes = {leaf.size: i for i, leaf in enumerate(leaves) if leaf.size}
    if not (jax.tree.leaves(message.changes) and sizes):
        return gradients
    changes = message._replace(
        gradients=no_leaf(message.gradients),
        shards=dataclasses.replace(message.shards, params=()),
    )
    place = sizes[min(sizes)]
    bad = jnp.where(is_finite(changes), 0.0, jnp.nan).astype(leaves[place].dtype)
    leaves[place] = leaves[place] + bad
    return jax.tree.unflatten(structure, leaves)


def _shards_of(message: Message, part: Tree) -> Any:
    kept = of_leaves(message.shards.params, message.gradients, part)
    return dataclasses.replace(message.shards, params=kept)


def without(message: Message, at_once: Reduced, devices: int) -> Message:
    """Returns a message without this device's share of what was exchanged at once.

    The sum over devices is then that of the messages, less the reduced one.
    """

    def less(own: jax.Array, total: jax.Array) -> jax.Array:
        return own - (total / devices).astype(own.dtype)

    gradients = jax.tree.map(less, message.gradients, at_once.sum.gradients)
    return with_constraints(message._replace(gradients=gradients))


class Updated(NamedTuple):
    """The arrays that are trained after an update, and whether it is applied."""

    new: Trainable
    applies: jax.Array


def as_delayed(trained: Trainable) -> Trainable:
    """Returns the arrays with the counters that delayed parameters have."""
    counters = trained.delayed_counters
    if counters is None:
        return trained
    return trained._replace(opt_state=merged(counters, trained.opt_state))


def of_each_kind(
    flags: Tree, late: Updated, rest: Updated, old: Trainable
) -> Trainable:
    """Returns the results of two updates, and `old` where an update is not applied.

    Args:
      flags: For each parameter whether its gradient is delayed.
      late: The update from `as_delayed(old)`, whose results delayed parameters take.
      rest: The update from `old`, whose results all others take.
    """

    def applied(update: Updated, new: Any, old: Any) -> Any:
        return None if old is None else jnp.where(update.applies, new, old)

    def chosen(flag: bool, old: Any, by_late: Any, by_rest: Any) -> Any:
        return applied(late, by_late, old) if flag else applied(rest, by_rest, old)

    owners = like_optimizer(old.opt_state, old.params, jax.tree.leaves(flags), False)
    states = old.opt_state, late.new.opt_state, rest.new.opt_state
    found = old._replace(
        params=jax.tree.map(
            chosen, flags, old.params, late.new.params, rest.new.params
        ),
        opt_state=jax.tree.map(chosen, owners, *states),
        delayed_counters=jax.tree.map(
            functools.partial(applied, late), late.new.opt_state, old.delayed_counters
        ),
    )
    mean, after = old.mean, late.new.mean
    if mean is None or after is None:
        return found
    means = mean.gradients, after.gradients, after.gradients
    gradients = jax.tree.map(chosen, flags, *means)
    loss = applied(late, after.loss, mean.loss)
    known = applied(late, after.known, mean.known)
    return found._replace(mean=Mean(gradients, loss, known))
