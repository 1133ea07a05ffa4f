"""The mean over groups of what each group has of its own."""

from typing import Any

import jax
import jax.numpy as jnp

from pipejax._internal.ravel import working_dtype
from pipejax._internal.types import Tree


def mean_of_groups(tree: Tree) -> Any:
    """Returns the mean of each array along its first axis, which is that of groups.

    Where all groups are equal, their number is kept as it is. Counters, and all other
    arrays that are not inexact, are those of the first group.
    """
    return jax.tree.map(_mean, tree)


def _mean(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[0]
    wide = x if jnp.iscomplexobj(x) else x.astype(working_dtype(x.dtype))
    return jnp.where((x == x[:1]).all(0), x[0], wide.mean(0).astype(x.dtype))
