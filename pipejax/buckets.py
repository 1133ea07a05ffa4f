"""Pytrees to flat vectors, one per dtype, and back.

One long vector is one collective: a step that reduces `L` leaves one by one queues `L`
collectives on one communication stream, and XLA overlaps at most a few of them.

- all leaves float32: one bucket `{"float32": [n]}`
- mixed float32 and bfloat16: two buckets, two collectives
- `dtype=bfloat16`: one bucket whatever the leaves are; each leaf is cast on the way in
  and back to its own dtype on the way out
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .concatenate import concatenate

Buckets = dict[str, jax.Array]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Form:
    """Structure, shapes and dtypes of a pytree of arrays, known while tracing.

    Itself a pytree without leaves, so that a program may return it.
    """

    structure: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, tree: Any) -> "Form":
        """The form of `tree`."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(
            structure, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
        )

    @property
    def tree(self) -> Any:
        """A tree of this form, of `jax.ShapeDtypeStruct`s."""
        return jax.tree.unflatten(self.structure, self.leaves)


def flatten(tree: Any, dtype: DTypeLike | None = None) -> Buckets:
    """Ravels the leaves of `tree`, in tree order, into one vector per dtype.

    Args:
      tree: pytree of arrays.
      dtype: travel dtype of every leaf; `None` keeps each leaf's own.

    Returns:
      `{dtype name: vector}`; empty for a tree without leaves.

    >>> flatten({"w": jnp.ones((2, 3)), "b": jnp.zeros(4)})["float32"].shape
    (10,)
    """
    leaves = jax.tree.leaves(tree)
    return {
        name: concatenate([jnp.ravel(leaves[i]).astype(name) for i in members])
        for name, members in _members(leaves, dtype).items()
    }


def unflatten(buckets: Buckets, like: Any, dtype: DTypeLike | None = None) -> Any:
    """Inverse of `flatten`, given a tree `like` the one that was flattened.

    Args:
      buckets: what `flatten(tree, dtype)` returned.
      like: pytree with the structure, shapes and dtypes of that tree, or of its first
        leaves: what is left over at the end of a vector is not looked at.
      dtype: the same travel dtype.

    Returns:
      A pytree as `like`, each leaf in its own dtype.
    """
    leaves = jax.tree.leaves(like)
    out: list[Any] = [None] * len(leaves)
    for name, members in _members(leaves, dtype).items():
        ends = itertools.accumulate(math.prod(leaves[i].shape) for i in members)
        start = 0
        for i, end in zip(members, ends, strict=True):
            piece = buckets[name][start:end]
            out[i] = piece.reshape(leaves[i].shape).astype(leaves[i].dtype)
            start = end
    return jax.tree.unflatten(jax.tree.structure(like), out)


def sizes(tree: Any, dtype: DTypeLike | None = None) -> dict[str, int]:
    """Elements per bucket of `flatten(tree, dtype)`, without computing anything."""
    leaves = jax.tree.leaves(tree)
    return {
        name: sum(math.prod(leaves[i].shape) for i in members)
        for name, members in _members(leaves, dtype).items()
    }


def shapes(
    tree: Any, dtype: DTypeLike | None = None
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Shapes of the leaves in each bucket of `flatten(tree, dtype)`, in their order."""
    leaves = jax.tree.leaves(tree)
    return {
        name: tuple(tuple(leaves[i].shape) for i in members)
        for name, members in _members(leaves, dtype).items()
    }


def all_finite(buckets: Buckets, lengths: dict[str, int]) -> jax.Array:
    """Whether the first so many elements of each bucket are finite."""
    # The largest magnitude would not do: of 4,096 elements or more XLA's maximum loses
    # NaN on CPUs, https://github.com/openxla/xla/issues/21461
    finite = [jnp.isfinite(buckets[k][:n]).all() for k, n in lengths.items()]
    return jnp.stack(finite).all()


def _members(leaves: list[Any], dtype: DTypeLike | None) -> dict[str, list[int]]:
    """Which leaves, by position, travel in which bucket."""
    members: dict[str, list[int]] = {}
    for i, leaf in enumerate(leaves):
        name = jnp.dtype(leaf.dtype if dtype is None else dtype).name
        members.setdefault(name, []).append(i)
    return members
