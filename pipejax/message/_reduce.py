"""The exchange: a message summed over devices, and whether the sum may be applied.

Who runs the stages of the sum, and beside what, is the executor's business.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pipejax.collectives import AllReduce, Layout, Stages, Summands, run
from pipejax.mesh import AxisName

from ._message import Message


class Reduced(NamedTuple):
    """A message summed over devices, and whether it may be applied.

    Attributes:
      sum: the message of all devices together, the same bits on each of them.
      arrived: bool scalar, whether it is real and not one of the pipeline's zeros.
      finite: bool scalar, whether its gradients and changes are finite.
    """

    sum: Message
    arrived: jax.Array
    finite: jax.Array

    @classmethod
    def of(cls, total: Message, arrived: jax.Array) -> "Reduced":
        """Looks at every gradient and change; at infinity and NaN, not at overflow."""
        # The largest magnitude would not do: of 4,096 elements or more XLA's maximum
        # loses NaN on CPUs, https://github.com/openxla/xla/issues/21461
        leaves = jax.tree.leaves((total.gradients, total.changes))
        finite = [jnp.isfinite(leaf).all() for leaf in leaves]
        whole = jnp.stack(finite).all() if finite else jnp.array(True)
        return cls(total, arrived, whole)

    @property
    def counts(self) -> jax.Array:
        """Whether the sum is of examples: it has arrived, and has a weight."""
        weight = self.sum.weight
        return self.arrived if weight is None else self.arrived & (weight != 0)

    @property
    def usable(self) -> jax.Array:
        """Whether it is of examples and finite."""
        return self.counts & self.finite

    def settled(self, new: Any, old: Any) -> Any:
        """Returns the codecs' states after the sum: the old ones if it is not usable.

        Args:
          new: the states after the sum.
          old: the states before it.
        """
        usable = self.usable
        return jax.tree.map(lambda n, o: jnp.where(usable, n, o), new, old)


def reduction(message: Message, all_reduce: AllReduce, axis_name: AxisName) -> Stages:
    """Returns the stages that sum messages of this form over devices.

    The gradients may be compressed. Changes and passengers stay exact.
    """
    return all_reduce(layout_of(message), axis_name)


def layout_of(message: Message) -> Layout:
    """Returns the layout of a message, or of its shapes."""
    return Layout.of(summands(message))


def codec_states(like: Message, all_reduce: AllReduce, axis_name: AxisName) -> Any:
    """Returns what the codecs keep before the first message of this form."""
    return all_reduce.init(layout_of(like), axis_name)


def summands(message: Message) -> Summands:
    """Returns the arrays of a message: what may be compressed, and what may not."""
    exact = (message.changes, message.passengers)
    return Summands(
        tuple(jax.tree.leaves(message.gradients)), tuple(jax.tree.leaves(exact))
    )


def message_of(arrays: Summands, like: Message) -> Message:
    """Undoes `summands`, for messages of the form of `like`."""
    exact = like.changes, like.passengers
    changes, passengers = jax.tree.unflatten(jax.tree.structure(exact), arrays.exact)
    structure = jax.tree.structure(like.gradients)
    return Message(jax.tree.unflatten(structure, arrays.coded), changes, passengers)


def reduced(
    message: Message,
    states: Any,
    arrived: jax.Array,
    all_reduce: AllReduce,
    axis_name: AxisName,
) -> tuple[Reduced, Any]:
    """Sums a message over devices, and looks whether the sum may be applied.

    Returns:
      The sum, and the codecs' states after it.
    """
    total, after = summed(message, states, all_reduce, axis_name)
    found = Reduced.of(total, arrived)
    return found, found.settled(after, states)


def summed(
    message: Message, states: Any, all_reduce: AllReduce, axis_name: AxisName
) -> tuple[Message, Any]:
    """Sums a message over devices, all stages back to back.

    Returns:
      The sum, and the codecs' states after it.
    """
    stages = reduction(message, all_reduce, axis_name)
    total, states = run(stages, summands(message), states)
    return message_of(total, message), states
