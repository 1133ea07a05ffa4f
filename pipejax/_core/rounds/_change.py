"""Subtracts parameters, some of which may be infinite."""

import jax
import jax.numpy as jnp

from pipejax._internal.types import Tree


def change(before: Tree, after: Tree) -> Tree:
    """Returns `after - before`, and 0 where both are the same.

    A parameter may be infinite, such as a mask of minus infinity that nothing trains.
    Subtraction from itself would give NaN.

    Examples:
      >>> change(jnp.float32([1, -jnp.inf, 0]), jnp.float32([3, -jnp.inf, jnp.inf]))
      Array([ 2.,  0., inf], dtype=float32)
    """
    return jax.tree.map(_change, before, after)


def _change(before: jax.Array, after: jax.Array) -> jax.Array:
    same = (before == after) | (jnp.isnan(before) & jnp.isnan(after))
    return jnp.where(same, 0, after - before)
