"""Sums a message over devices, and checks whether the sum may be applied."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from pipejax._internal.finite import check, check_all, check_sharded
from pipejax._internal.mesh import AxisName
from pipejax._internal.shards import copies_of, group_axes, on_shards
from pipejax._internal.types import CodecStates
from pipejax.collectives import (
    AllReduce,
    Layout,
    ReduceScatterAllGather,
    Sharded,
    Summands,
)

from ._message import Message


class Reduced(NamedTuple):
    """A message summed over devices, and whether the sum may be applied.

    Attributes:
      sum: Sum of the messages of all devices, with the same bits on each of them.
      valid: bool scalar, whether the messages are valid, and not the zeros of an empty
        queue.
      finite: bool scalar, whether all gradients and changes of the sum are finite.
      squares: Vector with the sum of squares of each array of gradients of the sum.
      updated: Parameters and optimizer state after the update, if the exchange itself
        has updated them. The sum then has no gradients.
      alike: bool of shape [1], whether all devices have the mark of this device
        (`_mark`). `None` if marks are not compared.
    """

    sum: Message
    valid: jax.Array
    finite: jax.Array
    squares: jax.Array
    updated: Any = None
    alike: jax.Array | None = None

    @classmethod
    def of(
        cls, total: Message, valid: jax.Array, *, on_partitions: bool = False
    ) -> "Reduced":
        """Checks every element of gradients and changes for infinity and NaN.

        The check takes no norm, which could overflow if all elements are finite.

        If `on_partitions`, this is traced to be run on pieces of the arrays, where a
        reduction may have a single array only.
        """
        # The largest magnitude would not show every NaN: on CPUs, XLA's maximum loses
        # NaN if there are 4,096 elements or more,
        # https://github.com/openxla/xla/issues/21461
        leaves = jax.tree.leaves((total.gradients, total.changes))
        if total.shards:
            specs = (*total.shards.params, *total.shards.changes)
            finite, squares = _of_group(leaves, specs)
        else:
            finite, squares = check_all(
                leaves, check_sharded if on_partitions else check
            )
        count = len(jax.tree.leaves(total.gradients))
        return cls(total, valid, finite, squares[:count])

    @property
    def counts(self) -> jax.Array:
        """Returns whether the sum has arrived and does not have a weight of 0."""
        weight = self.sum.weight
        return self.valid if weight is None else self.valid & (weight != 0)

    @property
    def usable(self) -> jax.Array:
        """Returns whether the sum counts and is finite."""
        return self.counts & self.finite

    @property
    def norm(self) -> jax.Array:
        """Returns the norm of the summed gradients, infinity if it is above 1e19."""
        return jnp.sqrt(self.squares.sum())


def is_finite(message: Message) -> jax.Array:
    """Returns whether all gradients and changes of a message are finite.

    Unlike `Reduced.of`, it needs no sum over the devices of a group, which XLA would
    merge with sums of the compute, and not a maximum.
    """
    leaves = jax.tree.leaves((message.gradients, message.changes))
    if not message.shards:
        return check_all(leaves)[0]
    _, inner = group_axes()

    def own(leaves: Sequence[jax.Array]) -> jax.Array:
        bad = (~check_all(leaves)[0]).astype(jnp.float32)
        return lax.pmax(bad, inner) == 0

    specs = [*message.shards.params, *message.shards.changes]
    return on_shards(own, (specs,), P())(leaves)


def _of_group(
    leaves: Sequence[jax.Array], specs: tuple[P, ...]
) -> tuple[jax.Array, jax.Array]:
    """Checks the shards of a group, with a single collective."""
    mesh, inner = group_axes()
    sizes = {name: mesh.shape[name] for name in inner}
    copies = [copies_of(spec, sizes) for spec in specs]

    def own(leaves: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        finite, squares = check_all(leaves)
        bad = (~finite).astype(jnp.float32)
        parts = jnp.append(squares / np.array(copies, np.float32), bad)
        total = lax.psum(parts, inner)
        return total[-1] == 0, total[:-1]

    return on_shards(own, (list(specs),), (P(), P()))(list(leaves))


def on_shards_of(message: Message, all_reduce: AllReduce) -> Any:
    """Returns the algorithm that sums a message: on shards, if a group shards it.

    With a sharded optimizer, it has two halves, between which devices have pieces.
    """
    shards = message.shards
    if shards.data_axes:
        all_reduce = ReduceScatterAllGather(all_reduce, shards.data_axes)
    if not shards:
        return all_reduce
    exact = summands(message).exact
    whole = [P()] * (len(exact) - len(shards.changes))
    return Sharded(all_reduce, shards.params, (*shards.changes, *whole))


def layout_of(message: Message) -> Layout:
    """Returns the layout of a message, which may be given by its shapes."""
    return Layout.of(summands(message))


def codec_states(
    like: Message, all_reduce: AllReduce, axis_name: AxisName
) -> CodecStates:
    """Returns the states of the codecs before the first message of this form."""
    return on_shards_of(like, all_reduce).init(layout_of(like), axis_name)


def summands(message: Message) -> Summands:
    """Returns the arrays of a message: gradients, and what must travel exactly."""
    exact = (message.changes, message.passengers)
    return Summands(
        tuple(jax.tree.leaves(message.gradients)), tuple(jax.tree.leaves(exact))
    )


def message_of(arrays: Summands, like: Message) -> Message:
    """Undoes `summands`: returns a message of the form of `like` with these arrays."""
    exact = like.changes, like.passengers
    changes, passengers = jax.tree.unflatten(jax.tree.structure(exact), arrays.exact)
    structure = jax.tree.structure(like.gradients)
    gradients = jax.tree.unflatten(structure, arrays.coded)
    return Message(gradients, changes, passengers, like.shards)
