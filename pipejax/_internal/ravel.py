"""Joins arrays into one long vector, and cuts the vector into the arrays again.

Gradients have the shapes of the parameters wherever the library holds them. Only codecs
and algorithms that cut their input into pieces need a single vector.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .fusion import concatenated

Shapes = tuple[tuple[int, ...], ...]


def working_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype in which vectors are summed, float64 only for float64."""
    return np.dtype("float64" if jnp.dtype(dtype) == "float64" else "float32")


def promoted(a: DTypeLike, b: DTypeLike) -> np.dtype:
    """Returns the dtype that holds both, also where JAX must promote nothing itself."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.promote_types(a, b))


def wide_zeros(tree: Any) -> Any:
    """Returns zeros of the same shapes, in at least 32 bits."""
    return jax.tree.map(
        lambda x: jnp.zeros_like(x, promoted(x.dtype, jnp.float32)), tree
    )


def ravel(
    arrays: Sequence[jax.Array],
    dtype: DTypeLike | None = None,
    size: int | None = None,
) -> jax.Array:
    """Joins the elements of arrays into one vector, with zeros at its end up to `size`.

    The arrays have one dtype, or are cast to `dtype`.
    """
    pieces = [jnp.ravel(x).astype(x.dtype if dtype is None else dtype) for x in arrays]
    missing = 0 if size is None else size - sum(x.size for x in pieces)
    if missing or not pieces:
        known = pieces[0].dtype if pieces else jnp.float32
        pieces.append(jnp.zeros(missing, known if dtype is None else dtype))
    return pieces[0] if len(pieces) == 1 else concatenated(pieces)


def unravel(vector: jax.Array, forms: Sequence[Any]) -> tuple[jax.Array, ...]:
    """Undoes `ravel`, and ignores elements at the end that belong to no array."""
    ends = itertools.accumulate(math.prod(x.shape) for x in forms)
    return tuple(
        vector[end - math.prod(x.shape) : end].reshape(x.shape).astype(x.dtype)
        for x, end in zip(forms, ends, strict=True)
    )
