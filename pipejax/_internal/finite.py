"""Finds out whether arrays are finite, and sums their squares, in one pass over each.

An array takes as long to read as both take to compute, so that both are always found
together.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .ravel import working_dtype

Check = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""From an array to whether all elements are finite, and the sum of their squares."""
SumOfSquares = Callable[[jax.Array], jax.Array]
"""From an array to the sum of its squares, float32."""

# XLA's loop on CPUs adds one element after another, and would lose small ones if there
# are more than this.
_LONG = 2**16


def check(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads an array once for both results.

    The sum is float32, and infinity from about 3e38 on.

    Examples:
      >>> check(jnp.float32([3, 4]))
      (Array(True, dtype=bool), Array(25., dtype=float32))
    """
    last = x.shape[-1] if x.ndim else 1
    if x.size <= _LONG * max(last, 1) and last <= _LONG:
        return _by_last(x)
    vector, head = x.reshape(-1), x.size // _LONG * _LONG
    most, rest = _by_last(vector[:head].reshape(-1, _LONG)), _by_last(vector[head:])
    return most[0] & rest[0], most[1] + rest[1]


def check_sharded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Does the same for an array that is split over devices, by two reductions.

    Neither XLA nor `_core.partitioned` splits a reduction of two arrays at once.
    """
    return jnp.isfinite(x).all(), sum_of_squares(x)


def check_all(
    arrays: Sequence[jax.Array], check: Check = check
) -> tuple[jax.Array, jax.Array]:
    """Returns whether all arrays are finite, and a vector with a sum for each."""
    if not arrays:
        return jnp.array(True), jnp.zeros(0)
    finite, squares = zip(*map(check, arrays), strict=True)
    # XLA leaves out sums that nobody reads. On CPUs, the loop for the rest is not
    # vectorized, and takes several times as long. No sum of squares is negative.
    sums = jnp.stack(squares)
    return jnp.stack(finite).all() & ~(sums < 0).any(), sums


def sum_of_squares(x: jax.Array) -> jax.Array:
    """Returns the sum of squares alone, also of an array that devices share."""
    return jnp.square(x.astype(working_dtype(x.dtype))).sum().astype(jnp.float32)


def sum_of_squares_on_one_device(x: jax.Array) -> jax.Array:
    """Returns the same, infinity if not finite, in a loop that is vectorized on CPUs.

    Unlike `sum_of_squares`, it is fused with what computes `x`.
    """
    finite, squares = check(x)
    return jnp.where(finite, squares, jnp.inf)


def _by_last(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reduces a long array along its last axis, and then along all others."""
    wide = x.astype(working_dtype(x.dtype))
    both, last = (jnp.isfinite(x), wide * wide), x.ndim - 1
    if x.size > _LONG and last:
        both, last = _reduced(both, (last,)), last - 1
    finite, squares = _reduced(both, tuple(range(last + 1)))
    return finite, squares.astype(jnp.float32)


def _reduced(
    both: tuple[jax.Array, jax.Array], axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    start = jnp.array(True), jnp.zeros((), both[1].dtype)
    return lax.reduce(both, start, lambda a, b: (a[0] & b[0], a[1] + b[1]), axes)
