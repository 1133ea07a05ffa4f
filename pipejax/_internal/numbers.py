"""Checks of real numbers that users pass, and of arrays of them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax._internal.types import Tree


def number(value: Any) -> float:
    """Returns a real number as a float, and anything else, also a bool, as NaN.

    Numbers of NumPy, and arrays of JAX and NumPy without dimensions, are numbers.
    """
    if isinstance(value, np.ndarray | jax.Array) and value.ndim == 0:
        value = value.item()
    kinds = int | float | np.integer | np.floating
    if isinstance(value, bool) or not isinstance(value, kinds):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an int that no float can hold
        return math.nan


def check_inexact(name: str, tree: Tree) -> None:
    """Raises a `ValueError` for the first leaf that is neither floating nor complex."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(leaf, "dtype", None) or jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                f"`{name}` must be floating arrays, got"
                f" `{name}{jax.tree_util.keystr(path)}` of dtype {dtype}, which has no"
                " gradient. Keep it out of the parameters."
            )
