"""A pytree as one matrix for each dtype, whose rows are chunks of equal size."""

from typing import Any

import jax
import jax.numpy as jnp

from pipejax._internal.ravel import ravel, unravel
from pipejax._internal.types import Tree

Flat = dict[str, jax.Array]
"""For each dtype of a pytree its elements as a matrix `[chunks, elements]`. Zeros fill
the last row."""


def chunked(tree: Tree, chunks: int) -> Flat:
    """Returns the elements of a pytree in chunks.

    Examples:
      >>> chunked({"a": jnp.arange(3.0), "b": jnp.ones(2)}, 2)["float32"].tolist()
      [[0.0, 1.0, 2.0], [1.0, 1.0, 0.0]]
    """
    return {
        name: _rows(ravel(leaves), chunks) for name, leaves in _by_dtype(tree).items()
    }


def whole(flat: Flat, like: Tree) -> Any:
    """Undoes `chunked`: returns a pytree with the shapes of `like`."""
    parts = {
        name: iter(unravel(flat[name].reshape(-1), leaves))
        for name, leaves in _by_dtype(like).items()
    }
    return jax.tree.map(lambda leaf: next(parts[_name(leaf)]), like)


def chunk_of(flat: Flat, number: jax.Array) -> Flat:
    """Returns one chunk, as vectors."""
    return {
        name: jax.lax.dynamic_index_in_dim(rows, number, 0, keepdims=False)
        for name, rows in flat.items()
    }


def with_chunk(flat: Flat, number: jax.Array, chunk: Flat) -> Flat:
    """Returns the chunks with another one in the place of one of them."""
    return {
        name: jax.lax.dynamic_update_index_in_dim(rows, chunk[name], number, 0)
        for name, rows in flat.items()
    }


def _rows(vector: jax.Array, chunks: int) -> jax.Array:
    missing = -vector.size % chunks
    return jnp.pad(vector, (0, missing)).reshape(chunks, -1)


def _by_dtype(tree: Tree) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for leaf in jax.tree.leaves(tree):
        found.setdefault(_name(leaf), []).append(leaf)
    return found


def _name(leaf: Any) -> str:
    return str(leaf.dtype)
