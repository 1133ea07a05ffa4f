"""Finds where a device takes its gradient, if it has the whole optimizer.

The rule itself is in `_core.prediction`. This module gives it what a state holds.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from pipejax._core.message import (
    InFlight,
    Message,
    Reduced,
    mean_as,
    mean_of,
    valid_in_queue,
)
from pipejax._core.prediction import (
    Kind,
    Mean,
    Own,
    Update,
    kind_of,
    like,
    predicted,
)
from pipejax._internal.finite import sum_of_squares, sum_of_squares_on_one_device
from pipejax._internal.shards import constrained
from pipejax._internal.structures import merged, select

from ._delayed import as_delayed, delays
from ._frozen import without_frozen
from ._state import Common, Trainable
from ._step import Settings
from ._update import apply, updated

KindOf = Callable[[optax.Params, int, int], Kind | None]
"""From shapes of the whole parameters, the number of gradients in flight, and that of
devices to the kind of update. `None` if nothing is predicted, or by own gradients."""


def kinds(settings: Settings) -> KindOf:
    """Returns a function that says how the update depends on gradients.

    An update of many arrays takes seconds to trace, and several programs ask. The
    function remembers what it has found.
    """

    @functools.cache
    def found(structure: Any, forms: tuple[Any, ...], length: int) -> Kind:
        leaves = [jax.ShapeDtypeStruct(*form) for form in forms]
        params = jax.tree.unflatten(structure, leaves)
        opt_state = jax.eval_shape(settings.tx.init, params)
        return kind_of(update_of(settings), params, opt_state, length)

    def kind(params: optax.Params, length: int, devices: int) -> Kind | None:
        if settings.weight_prediction != "linearized" or not length or devices == 1:
            return None
        leaves, structure = jax.tree.flatten(params)
        forms = tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves)
        return found(structure, forms, length)

    return kind


def update_of(settings: Settings) -> Update:
    """Returns the update of the optimizer, as predictions take it."""
    return functools.partial(updated, settings.tx)


def empty_mean(
    settings: Settings, kind_of: KindOf, trainable: Trainable, length: int
) -> Mean | None:
    """Returns the mean that predictions need before any is applied, or `None`."""
    params = trainable.whole_params
    kind = kind_of(params, length, lax.axis_size(settings.axis_name))
    if kind is None or kind.name == "linear":
        return None
    trained = without_frozen(settings.tx, params)
    return Mean.empty(trained, settings.reduce_dtype)


def point(
    settings: Settings, kind_of: KindOf, state: Common, in_flight: InFlight
) -> optax.Params:
    """Returns the parameters at which this device takes its gradient."""
    trained = state.trainable
    if not settings.weight_prediction or not in_flight.pending:
        return trained.params
    # Without the barrier, XLA computes what the prediction and the update have in
    # common only once, and keeps it beside the parameters and the optimizer state: for
    # a ResNet-18 on GPUs, one and a half copies of the parameters. The barrier leaves
    # out the step counter. With it, the all-reduce would wait for the barrier.
    held = trained._replace(gathered=None, slopes=None)
    trained = lax.optimization_barrier(held)
    params, mean = trained.params, trained.mean
    if mean is None:
        return _by_own(settings, state._replace(trainable=trained), in_flight)
    opt_state = as_delayed(trained).opt_state
    devices = lax.axis_size(settings.axis_name)
    kind = kind_of(params, len(in_flight.pending), devices)
    assert kind is not None  # because something needs the mean
    # Gradients that are not delayed are not in flight. The last mean stands for them.
    own = own_gradients(params, in_flight, like(mean.gradients, params))
    squares = sum_of_squares if trained.shards else sum_of_squares_on_one_device
    found = predicted(kind, update_of(settings), params, opt_state, mean, own, squares)
    flags = delays(settings.delayed, params)
    found = jax.tree.map(lambda flag, v, w: v if flag else w, flags, found, params)
    return constrained(found, trained.shards.params)


def _by_own(settings: Settings, state: Common, in_flight: InFlight) -> optax.Params:
    """Returns the parameters to which this device's own messages in flight lead.

    They are applied in their order, in place of the means over devices. If updates are
    linear and all devices have the same weight, the mean of the results over devices is
    exact. How far they may lie apart depends on the learning rate (`pj.stability`).
    """
    # The updates are predictions, and must not replace the mean that was applied.
    state = state._replace(trainable=state.trainable._replace(mean=None))
    linearized = settings.weight_prediction == "linearized"
    either = linearized and lax.axis_size(settings.axis_name) > 1
    for own, valid in zip(in_flight.pending, valid_in_queue(in_flight), strict=True):
        reduced = Reduced.of(own, valid)
        if either:
            reduced = _or_zeros(reduced)
        state, _ = apply(settings, state, None, reduced, alone=True)
    return state.trainable.params


def own_gradients(
    params: optax.Params, in_flight: InFlight, others: optax.Updates
) -> list[Own]:
    """Returns this device's gradients in flight, oldest first.

    `others` take the place of those that are not in flight.
    """

    def one(message: Message, valid: jax.Array) -> Own:
        usable = Reduced.of(message, valid).usable
        gradients = mean_as(message.gradients, params, message, 1)
        loss = mean_of(message.passengers.loss, message, 1)
        return Own.of(merged(gradients, others), loss, valid, usable)

    return list(map(one, in_flight.pending, valid_in_queue(in_flight)))


def _or_zeros(own: Reduced) -> Reduced:
    """Returns a message with zeros in place of gradients that are not usable.

    The mean in flight may be usable all the same, and moments move with it.
    """
    usable = own.usable
    gradients, passengers = own.sum.gradients, own.sum.passengers
    zeros = jax.tree.map(jnp.zeros_like, gradients)
    if passengers.weighted:
        weight = jnp.where(usable, passengers.weight, 1)
        values = passengers.values.at[1].set(weight)
        passengers = dataclasses.replace(passengers, values=values)
    message = own.sum._replace(
        gradients=select(usable, gradients, zeros), passengers=passengers
    )
    return own._replace(sum=message, finite=jnp.array(True))
