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
from jax import lax
from jax.typing import DTypeLike

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


def ravel(arrays: Sequence[jax.Array], dtype: DTypeLike | None = None) -> jax.Array:
    """Joins the elements of arrays into one vector.

    The arrays have one dtype, or are cast to `dtype`.
    """
    pieces = [jnp.ravel(x).astype(x.dtype if dtype is None else dtype) for x in arrays]
    if not pieces:
        return jnp.zeros(0, jnp.float32 if dtype is None else dtype)
    return pieces[0] if len(pieces) == 1 else _concatenate(pieces)


def unravel(vector: jax.Array, forms: Sequence[Any]) -> tuple[jax.Array, ...]:
    """Undoes `ravel`, and ignores elements at the end that belong to no array."""
    ends = itertools.accumulate(math.prod(x.shape) for x in forms)
    return tuple(
        vector[end - math.prod(x.shape) : end].reshape(x.shape).astype(x.dtype)
        for x, end in zip(forms, ends, strict=True)
    )


def _concatenate(pieces: list[jax.Array]) -> jax.Array:
    """Concatenates vectors. Unlike `jnp.concatenate`, it is fast on CPUs."""

    def unfused(*pieces: jax.Array) -> jax.Array:
        # XLA:CPU splits a fused concatenation over its threads element by element, with
        # a branch for each element. For 1 MB of an MLP's gradients, this takes 7 ms on
        # two cores, where a copy takes 0.03 ms. XLA does not fuse the concatenation if
        # it is inside a conditional whose predicate the compiler cannot evaluate.
        always = lax.optimization_barrier(jnp.array(True))
        backwards = lambda *pieces: jnp.concatenate(pieces[::-1])  # noqa: E731
        return lax.cond(
            always, lambda *pieces: jnp.concatenate(pieces), backwards, *pieces
        )

    return lax.platform_dependent(
        *pieces, cpu=unfused, default=lambda *pieces: jnp.concatenate(pieces)
    )
