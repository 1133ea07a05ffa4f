"""Makes the message of a batch, at the parameters that a device predicts."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import lax

from pipejax._core.checks import check_keywords
from pipejax._core.message import InFlight, Message, width_of
from pipejax._core.prediction import Mean
from pipejax._internal.types import Keys

from ._check_inner import warn_of_unused_axes
from ._check_state import check_mean, check_pending, check_room
from ._delayed import parted
from ._gradient import empty_message, first_part, local_message
from ._inputs import Inputs
from ._model_state import predicted_model_state
from ._state import Common, Trainable
from ._step import Computed, Settings
from ._typed_loss import typed_loss
from ._within_host import averaged_within_host

Point = Callable[[Common, InFlight], optax.Params]
"""From a state and this device's messages in flight to the parameters at which this
device takes its gradient."""
EmptyMean = Callable[[Trainable, int], Mean | None]
"""From the arrays that are trained and the number of gradients in flight to the mean
that predictions need before any is applied."""


def compute(
    settings: Settings,
    point: Point,
    empty_mean: EmptyMean,
    state: Common,
    in_flight: InFlight,
    inputs: Inputs,
) -> tuple[Message, Computed]:
    """Returns this device's message, and what the update will need."""
    shards, whole = state.shards, state.trainable.whole_params

    def empty() -> Message:
        message = empty_message(settings, whole, state.model_state, shards)
        return parted(settings, whole, message)[0]

    check_pending(jax.eval_shape(empty), in_flight)
    if length := len(in_flight.pending):
        wanted = jax.eval_shape(lambda: empty_mean(state.trainable, length))
        check_mean(state, wanted is not None)
    keywords = {"model_state": state.model_state, "rng": state.rng}
    check_keywords(settings.loss_fn, "train.init", keywords)
    check_keywords(settings.loss_fn, "train.step", {"shared": inputs.shared})
    rng, key = _split(state.rng, lax.axis_index(settings.axis_name))
    if shards:
        part = first_part(inputs.batch, settings.microbatches)
        args = whole, state.model_state, key, inputs._replace(batch=part), shards
        warn_of_unused_axes(typed_loss(settings, shards, inputs.specs), *args)
    params = point(state, in_flight)
    model_state = predicted_model_state(
        state.model_state, in_flight, shards, skip_nonfinite=settings.skip_nonfinite
    )
    message, counters = local_message(
        settings, params, model_state, key, inputs, shards
    )
    check_room(message, in_flight)
    if axis := settings.axis_within_host(width_of(in_flight)):
        message = averaged_within_host(message, axis)
    message, at_once = parted(settings, whole, message)
    return message, Computed(counters, rng, state.step + 1, at_once)


def _split(rng: Keys, place: jax.Array) -> tuple[Any, Any]:
    """Returns the keys for the next step, and this device's keys for this step."""
    if rng is None:
        return None, None
    keys, structure = jax.tree.flatten(rng)
    pairs = [tuple(jax.random.split(key)) for key in keys]
    following = [key for key, _ in pairs]
    own = [jax.random.fold_in(key, place) for _, key in pairs]
    return jax.tree.unflatten(structure, following), jax.tree.unflatten(structure, own)
