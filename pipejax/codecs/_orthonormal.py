"""Makes the matrices of low-rank codecs orthonormal, in the precision of float32."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a matrix product in the precision of its arguments on any device.

    By default, TPUs multiply in bfloat16 and GPUs in TF32. The sum of what devices send
    would then not be what is rebuilt from their sums, and no residual keeps the rest.
    """
    return jnp.matmul(a, b, precision="highest")


def orthonormal(matrices: Sequence[jax.Array]) -> list[jax.Array]:
    """Makes the columns of matrices `[..., m, r]` orthonormal (Gram-Schmidt).

    A column that depends on those before it becomes zero. NaN stays NaN. Matrices of
    the same shape are one array for the device, which has fewer operations then.
    """
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(i)
    found: dict[int, jax.Array] = {}
    for places in by_shape.values():
        stacked = _gram_schmidt(jnp.stack([matrices[i] for i in places]))
        found.update(zip(places, stacked, strict=True))
    return [found[i] for i in range(len(matrices))]


@functools.partial(jnp.vectorize, signature="(m,r)->(m,r)")
def _gram_schmidt(columns: jax.Array) -> jax.Array:
    def one(i: jax.Array, found: jax.Array) -> jax.Array:
        # Columns that have had their turn are orthonormal.
        done = jnp.where(jnp.arange(found.shape[1]) < i, found, 0.0)
        column = lax.dynamic_index_in_dim(found, i, 1, keepdims=False)
        # Squares of the elements could overflow or underflow in float32 otherwise.
        largest = jnp.max(jnp.abs(column), initial=0.0)
        column = column / jnp.where(largest == 0, 1.0, largest)
        length = jnp.linalg.norm(column)
        for _ in range(2):  # The second pass removes what rounding errors have left.
            column = column - product(done, product(column, done))
        norm = jnp.linalg.norm(column)
        # What is left of a dependent column is rounding error. That of float32 is 6e-8
        # for each operation, so 1e-5 leaves room for about 160 of them in the same
        # direction.
        kept = norm > 1e-5 * length
        # Both comparisons are false for NaN, so that a NaN column stays NaN.
        gone = norm <= 1e-5 * length
        column = column / jnp.where(kept, norm, jnp.where(gone, 1.0, norm))
        column = jnp.where(gone, 0.0, column)
        return lax.dynamic_update_index_in_dim(found, column, i, 1)

    return lax.fori_loop(0, columns.shape[1], one, columns)


def restarted(new: jax.Array, old: jax.Array) -> jax.Array:
    """Scales the columns of `new` to a largest magnitude of 1."""
    largest = jnp.max(jnp.abs(new), axis=-2, keepdims=True)
    # A zero or NaN column would remain in all later steps, since `M Q` has it too.
    good = jnp.isfinite(new).all(axis=-2, keepdims=True) & (largest > 0)
    # Only the directions of the columns count, because `P` is made orthonormal.
    # Unscaled, `Q` has the magnitude of M, and `M Q` that of its square, which may
    # overflow.
    return jnp.where(good, new / jnp.where(good, largest, 1.0), old)
