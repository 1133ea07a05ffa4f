"""What one device contributes to a step's exchange.

- gradients, in the shapes of the parameters, so that they are found by name
- changes of the model state, leaf by leaf likewise
- passengers: loss, weight and metrics, a few numbers that travel beside them

A message holds everything in the dtype in which it travels. A scalar travels as a
vector of one element: over a mesh of p devices, each device's part of an array lies
behind that of the device before, so that the first axis of every array is p times as
long.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax.vectors import working_dtype


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values"],
    meta_fields=["weighted", "metrics_form"],
)
@dataclasses.dataclass(frozen=True)
class Passengers:
    """Loss, weight and metrics as one vector.

    Attributes:
      values: float32, `[loss, weight (if weighted), metrics ...]`.
      weighted: whether the loss function returns a weight.
      metrics_form: the structure of the metrics.
    """

    values: jax.Array
    weighted: bool
    metrics_form: Any

    @classmethod
    def of(
        cls, loss: jax.Array, metrics: Any, weight: jax.Array | None = None
    ) -> "Passengers":
        """Collects scalars into one vector."""
        leaves, form = jax.tree.flatten(metrics)
        scalars = [loss, *([] if weight is None else [weight]), *leaves]
        values = jnp.stack([jnp.asarray(x).astype(jnp.float32) for x in scalars])
        return cls(values, weight is not None, form)

    @property
    def loss(self) -> jax.Array:
        """The first value."""
        return self.values[0]

    @property
    def weight(self) -> jax.Array | None:
        """The second value, if there is a weight."""
        return self.values[1] if self.weighted else None

    @property
    def metrics(self) -> Any:
        """The other values, in their structure."""
        leaves = self.values[2 if self.weighted else 1 :]
        return jax.tree.unflatten(self.metrics_form, list(leaves))


class Message(NamedTuple):
    """What one device contributes to a step's exchange, or the sum over devices.

    Attributes:
      gradients: pytree like the parameters; weighted if the passengers have a weight.
      changes: pytree like the model state: what the step added to each floating leaf,
        and `None` in place of other leaves.
      passengers: `Passengers`: loss, weight and metrics; `None` outside a train step.
    """

    gradients: Any
    changes: Any = None
    passengers: Any = None

    @property
    def weight(self) -> jax.Array | None:
        """The weight among the passengers, if there is one."""
        return None if self.passengers is None else self.passengers.weight


def mean(total: jax.Array, message: Message, devices: int) -> jax.Array:
    """Divides a sum by the number of devices, or by the sum of their weights.

    Args:
      total: an array of gradients, a loss or a metric, summed over devices.
      message: the sum of the messages it belongs to, whose weight counts.
      devices: how many it was summed over.
    """
    weight = message.weight
    if weight is None:
        return total / devices
    wide = working_dtype(total.dtype)
    weight = jnp.where(weight == 0, 1, weight).astype(wide)
    return (total.astype(wide) / weight).astype(total.dtype)


def travelling(tree: Any, dtype: DTypeLike | None) -> Any:
    """Casts arrays to the dtype in which they travel, and scalars to vectors.

    Args:
      tree: pytree of arrays.
      dtype: floating dtype; `None` keeps each array's own.
    """
    return jax.tree.map(lambda x: jnp.atleast_1d(x).astype(dtype or x.dtype), tree)


def arrived_as(tree: Any, like: Any) -> Any:
    """Undoes `travelling`: gives arrays the shapes and dtypes of those in `like`."""
    return jax.tree.map(lambda x, y: x.reshape(y.shape).astype(y.dtype), tree, like)
