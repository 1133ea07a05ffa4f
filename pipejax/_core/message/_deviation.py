"""The deviation of a device's gradients from their mean, which predictions may use."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from pipejax._internal.mesh import AxisName
from pipejax._internal.shards import constrained

from ._in_flight import InFlight
from ._message import mean_of
from ._reduce import Reduced


def deviation(
    in_flight: InFlight, reduced: Reduced, axis_name: AxisName
) -> optax.Updates | None:
    """Returns this device's gradients of the message that is due, minus the mean.

    It is zero if the reduced message is not usable, and `None` unless the queue keeps
    one.
    """
    if in_flight.deviation is None:
        return None
    own, total = in_flight.pending[0], reduced.sum
    usable, devices = reduced.usable, lax.axis_size(axis_name)
    found = jax.tree.map(
        lambda o, t: jnp.where(
            usable, mean_of(o, own, 1) - mean_of(t, total, devices), 0
        ).astype(o.dtype),
        own.gradients,
        total.gradients,
    )
    return constrained(found, own.shards.params)
