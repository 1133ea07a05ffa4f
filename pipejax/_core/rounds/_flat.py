"""A pytree as chunks of equal size, which travel one by one."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pipejax._internal.ravel import ravel, unravel
from pipejax._internal.types import Tree

Chunk = dict[str, jax.Array]
"""A part of the elements of a pytree, as a vector for each dtype."""


def chunked(tree: Tree, count: int) -> tuple[Chunk, ...]:
    """Returns the elements of a pytree in chunks. Zeros fill the last one.

    Examples:
      >>> first, last = chunked({"a": jnp.arange(3.0), "b": jnp.ones(2)}, 2)
      >>> first["float32"].tolist(), last["float32"].tolist()
      ([0.0, 1.0, 2.0], [1.0, 1.0, 0.0])
    """
    rows = {
        name: _rows(ravel(leaves), count) for name, leaves in _by_dtype(tree).items()
    }
    return tuple({name: x[i] for name, x in rows.items()} for i in range(count))


def whole(chunks: Sequence[Chunk], like: Tree) -> Any:
    """Undoes `chunked`: returns a pytree with the shapes of `like`."""
    parts = {
        name: iter(unravel(ravel([chunk[name] for chunk in chunks]), leaves))
        for name, leaves in _by_dtype(like).items()
    }
    return jax.tree.map(lambda leaf: next(parts[_name(leaf)]), like)


def _rows(vector: jax.Array, count: int) -> jax.Array:
    missing = -vector.size % count
    return jnp.pad(vector, (0, missing)).reshape(count, -1)


def _by_dtype(tree: Tree) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for leaf in jax.tree.leaves(tree):
        found.setdefault(_name(leaf), []).append(leaf)
    return found


def _name(leaf: Any) -> str:
    return str(leaf.dtype)
