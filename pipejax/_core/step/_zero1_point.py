"""Finds where a device takes its gradient, if the optimizer is sharded.

A device cannot expand an update whose state other devices have. Their owners do it once
they have the new mean m. In place of the parameters w, devices gather
`c = w + U(m; s) - P m`, and P in 8 bits beside it. A device then predicts `c + P g`
with its own gradient g. If P depends on nothing that is split, devices find it
themselves.

Before any mean is known, P is 0 and c is w: nothing is predicted. An expansion at its
own gradient, as without a sharded optimizer, would need the state of all devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from pipejax._core.message import InFlight, valid_in_queue
from pipejax._core.prediction import along, changed, expanded
from pipejax._internal.shards import constrained

from ._partition import Partition
from ._prediction import KindOf, own_gradients, update_of
from ._state import Common, Trainable
from ._step import Settings


def point(
    settings: Settings, kind_of: KindOf, state: Common, in_flight: InFlight
) -> optax.Params:
    """Returns the parameters at which this device takes its gradient."""
    trained = state.trainable
    gathered = jax.tree.map(
        lambda whole, own: whole.astype(own.dtype), trained.gathered, trained.params
    )
    if not settings.weight_prediction or not in_flight.pending:
        return gathered
    assert trained.mean is not None  # because something is predicted
    if trained.mean.gradients is not None and trained.slopes is None:  # elements mix
        return gathered
    whole = trained.whole_params
    own = own_gradients(whole, in_flight, jax.tree.map(jnp.zeros_like, whole))
    params, slopes = gathered, _slopes(settings, trained, in_flight)
    for each, slope in zip(own, slopes, strict=True):
        params = jax.tree.map(
            lambda c, p, g: along(c, p, g).astype(c.dtype),
            params,
            slope,
            each.gradients,
        )
    return constrained(params, trained.shards.params)


def _slopes(
    settings: Settings, trained: Trainable, in_flight: InFlight
) -> tuple[Any, ...]:
    """Returns the slopes of the update, for each gradient in flight.

    A state without slopes is one whose slopes depend on nothing that is split.
    """
    if trained.slopes is not None:
        return trained.slopes.decoded()
    whole = trained.whole_params
    partition = Partition.of(settings, trained)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), whole)
    known, valid = _known(trained.opt_state, partition), valid_in_queue(in_flight)
    losses = [jnp.float32(0)] * len(valid)

    def change(*gradients: optax.Updates) -> Any:
        return changed(update_of(settings), zeros, known, gradients, losses, valid)

    return expanded(change, [zeros] * len(valid))[1]


def _known(opt_state: optax.OptState, partition: Partition) -> optax.OptState:
    """Returns the whole optimizer state, with zeros in place of what is split."""
    leaves, structure = jax.tree.flatten(partition.whole_opt_state)
    own, data_axes = jax.tree.leaves(opt_state), partition.opt_state_axes
    found = [
        leaf if cut is None else jnp.zeros(form.shape, form.dtype)
        for form, leaf, cut in zip(leaves, own, data_axes, strict=True)
    ]
    return jax.tree.unflatten(structure, found)
