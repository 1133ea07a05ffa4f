"""Divides a message into gradients that are delayed, and others exchanged at once.

`delayed` of `make_train_step` chooses parameters. Their gradients wait in the queue,
and the exchange of K-1 steps ago runs beside the compute. The gradients of all others
are exchanged in the step that computes them, as at width 1. The update is given one
tree, with the mean in flight of the one kind and the fresh mean of the other:

$$w_t = w_{t-1} - u(g_{t-K}^{delayed}, g_{t-1}^{at once})$$

Where one of the two has not arrived, or is not finite, its parameters and their part of
the optimizer's state stay as they are. This is so in the first K-1 steps for what is
delayed, and in a drain for what is not.

`at_once` of `make_train_step` divides every gradient. Let L be what a linear codec,
such as PowerSGD, keeps of the sum over devices. It is exchanged at once, in a few
bytes. The rest is delayed, and the update is given

$$w_t = w_{t-1} - u(L_{t-1} + (g - L)_{t-K})$$

Directions in which devices agree, among them those of large curvature, have no delay
then. Over a run, the sum of all gradients is that of synchronous training.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pipejax._core.message import Message, Passengers, Reduced, with_constraints
from pipejax._core.prediction import Mean
from pipejax._internal.structures import like_optimizer, no_leaf, of_leaves
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
        return message, _at_once(message, message.gradients)
    if all(jax.tree.leaves(flags)):
        return message, None
    late = jax.tree.map(lambda flag, g: g if flag else None, flags, message.gradients)
    rest = jax.tree.map(lambda flag, g: None if flag else g, flags, message.gradients)

    delayed = message._replace(gradients=late, shards=_shards_of(message, late))
    return delayed, _at_once(message, rest)


def _at_once(message: Message, gradients: optax.Updates) -> Message:
    passengers = message.passengers
    return Message(
        gradients=gradients,
        changes=no_leaf(message.changes),
        passengers=Passengers.of(passengers.loss, None, passengers.weight),
        shards=dataclasses.replace(_shards_of(message, gradients), changes=()),
    )


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


def held(
    flags: Tree, late: jax.Array, at_once: jax.Array, new: Trainable, old: Trainable
) -> Trainable:
    """Returns `new`, with the values of `old` where a gradient is not applied.

    Args:
      flags: For each parameter whether its gradient is delayed.
      late: Whether the delayed gradients are applied.
      at_once: Whether the others are.
    """
    params = jax.tree.map(lambda flag: late if flag else at_once, flags)
    of_params = jax.tree.leaves(params)
    mean = new.mean
    if mean is not None:
        gradients = jax.tree.map(
            lambda flag, g: None if g is None else flag, params, mean.gradients
        )
        mean = Mean(gradients, loss=late, known=late)
    applies = new._replace(
        params=params,
        opt_state=like_optimizer(new.opt_state, new.params, of_params, late | at_once),
        mean=mean,
    )
    return jax.tree.map(jnp.where, applies, new, old)
