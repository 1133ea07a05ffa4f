"""Defines the message that one device contributes to a step's exchange.

A message has three parts:

- Gradients, in the shapes of the parameters, so that they can be found by name.
- Changes of the model state, in the shapes of its leaves.
- Passengers: loss, weight and metrics, which are a few numbers.

A message holds all arrays in the dtypes in which they travel. On a mesh of p devices,
the arrays of all devices are concatenated along the first axis, which is then p times
as long. A scalar therefore travels as a vector of one element. If the devices of a host
average their gradients, the arrays of all hosts are concatenated.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from pipejax._internal.ravel import promoted, working_dtype
from pipejax._internal.shards import UNSHARDED, Shards, constrained
from pipejax._internal.types import Tree


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values"],
    meta_fields=["weighted", "metrics_form"],
)
@dataclasses.dataclass(frozen=True)
class Passengers:
    """Loss, weight and metrics as one vector.

    Attributes:
      values: float32 vector of the loss, the weight if `weighted`, and all metrics.
      weighted: Whether the loss function returns a weight.
    """

    values: jax.Array
    weighted: bool
    metrics_form: Any

    @classmethod
    def of(
        cls, loss: jax.Array, metrics: Tree, weight: jax.Array | None = None
    ) -> "Passengers":
        """Collects the scalars of a loss, metrics and a weight into one vector."""
        leaves, form = jax.tree.flatten(metrics)
        scalars = [loss, *([] if weight is None else [weight]), *leaves]
        values = jnp.stack([jnp.asarray(x).astype(jnp.float32) for x in scalars])
        return cls(values, weight is not None, form)

    @property
    def names(self) -> list[str]:
        """Returns the name of each value: `loss`, `weight`, or the path of a metric."""
        form = self.metrics_form
        tree = jax.tree.unflatten(form, range(form.num_leaves))
        paths = jax.tree_util.tree_leaves_with_path(tree)
        metrics = [f"metrics{jax.tree_util.keystr(path)}" for path, _ in paths]
        return ["loss", *(["weight"] if self.weighted else []), *metrics]

    @property
    def count(self) -> int:
        """Returns the number of values of one message."""
        return 1 + self.weighted + self.metrics_form.num_leaves

    @property
    def loss(self) -> jax.Array:
        """Returns the loss, which is the first value."""
        return self.values[0]

    @property
    def weight(self) -> jax.Array | None:
        """Returns the weight, which is the second value, or `None` without weights."""
        return self.values[1] if self.weighted else None

    @property
    def metrics(self) -> Any:
        """Returns the metrics, which are the other values, in their structure."""
        leaves = self.values[2 if self.weighted else 1 :]
        return jax.tree.unflatten(self.metrics_form, list(leaves))


class Message(NamedTuple):
    """The contribution of one device to a step's exchange, or its sum over devices.

    If the passengers have a weight, gradients, loss and metrics are multiplied by it.

    Attributes:
      changes: Pytree like the model state, with what the step added to each leaf that
        it changed, and `None` in place of leaves that are not sent: those that the loss
        function returned unchanged, and counters and keys. Changes are not weighted.
      passengers: `Passengers` with loss, weight and metrics, or `None` outside a train
        step.
      shards: How a group of devices shards gradients and changes.
    """

    gradients: optax.Updates
    changes: Any = None
    passengers: Any = None
    shards: Shards = UNSHARDED

    @property
    def weight(self) -> jax.Array | None:
        """Returns the weight among the passengers, or `None` if there is none."""
        return None if self.passengers is None else self.passengers.weight


def with_constraints(message: Message) -> Message:
    """Returns the message, whose arrays XLA must split as `message.shards` say."""
    shards = message.shards
    return message._replace(
        gradients=constrained(message.gradients, shards.params),
        changes=constrained(message.changes, shards.changes),
    )


def mean_of(total: jax.Array, message: Message, devices: int) -> jax.Array:
    """Divides a sum by the number of devices, or by the sum of their weights.

    `message` is the sum that `total` is from. A sum whose weight is 0 is returned
    unchanged.
    """
    weight = message.weight
    if weight is None:
        return total / devices
    wide = working_dtype(total.dtype)
    weight = jnp.where(weight == 0, 1, weight).astype(wide)
    return (total.astype(wide) / weight).astype(total.dtype)


def travelling(tree: Tree, dtype: DTypeLike | None) -> Tree:
    """Casts arrays to the dtype in which they travel, and makes scalars vectors.

    Complex numbers travel as pairs of real numbers, along an axis at the end.
    """

    def one(x: jax.Array) -> jax.Array:
        x = jnp.atleast_1d(x)
        if jnp.iscomplexobj(x):
            x = jnp.stack([x.real, x.imag], axis=-1)
        return x.astype(dtype or x.dtype)

    return jax.tree.map(one, tree)


def mean_as(sums: Tree, like: Tree, message: Message, devices: int) -> Tree:
    """Undoes `travelling` on sums: returns means with the shapes and dtypes of `like`.

    Where `sums` have `None`, the means have `None`.

    They are cast after the division, because a float16 mean may have a sum that float16
    cannot hold.
    """

    def one(y: Any, total: jax.Array | None) -> jax.Array | None:
        return None if total is None else mean(total, y)

    def mean(total: jax.Array, y: Any) -> jax.Array:
        if jnp.issubdtype(y.dtype, jnp.complexfloating):
            part = jax.ShapeDtypeStruct(y.shape, jnp.finfo(y.dtype).dtype)
            pair = total[..., 0], total[..., 1]
            return lax.complex(*(mean(each, part) for each in pair))
        total = total.reshape(y.shape)
        wide = total.astype(promoted(total.dtype, y.dtype))
        return mean_of(wide, message, devices).astype(y.dtype)

    return jax.tree.map(one, like, sums)
