"""Expands a change of the parameters, with slopes that are finite and bounded.

Adam's slope grows without bound where the second moment is close to 0.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pipejax._internal.finite import SumOfSquares, sum_of_squares
from pipejax._internal.types import Tree

from ._expand import expanded

# No element may respond to its gradient this many times as strongly as its whole array
# does to m.
STEEPEST = 10.0


class Expansion(NamedTuple):
    """A change of the parameters to first order in the gradients.

    Attributes:
      change: `U(m; s)`, 0 where it is not finite.
      slopes: For each gradient in flight the tree P, within its bounds.
    """

    change: Tree
    slopes: tuple[Any, ...]


def expansion(
    change_by: Callable[..., Any], means: Sequence[Any], bounds: Tree | None
) -> Expansion:
    """Expands a change of the parameters at `means`.

    Where P or U is not finite, P is 0: the prediction is that by m. `bounds` are those
    of every P, and `None` if P is not bounded.
    """
    value, slopes = expanded(change_by, means)

    def usable(value: jax.Array, slope: jax.Array, within: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(slope) & jnp.isfinite(value), within, 0)

    found = []
    for slope in slopes:
        within = slope if bounds is None else jax.tree.map(_within, slope, bounds)
        found.append(jax.tree.map(usable, value, slope, within))
    return Expansion(finite(value), tuple(found))


def bounds_of(
    change_by: Callable[..., Any],
    mean: Tree,
    count: int,
    squares: SumOfSquares = sum_of_squares,
) -> Any:
    """Returns a bound of the slopes of each array, float32, for an expansion at m.

    A bound is `STEEPEST` times the length of `U(m; s)` over that of m, or 0 if this is
    not finite. `U` is the change by `count` gradients, all equal to m.
    """
    # At m, an update of Adam is m / sqrt(v), so that |U| / |m| is the root mean square
    # of its slopes, weighted by m.

    def bound(change: jax.Array, m: jax.Array) -> jax.Array:
        found = STEEPEST * jnp.sqrt(squares(change)) / jnp.sqrt(squares(m))
        return jnp.where(jnp.isfinite(found), found, 0)

    # Behind the barrier, XLA computes U for the sums alone, and the expansion computes
    # it again. Without it, XLA on CPUs writes half a dozen arrays of the model's size
    # to memory, which takes longer.
    mean = lax.optimization_barrier(mean)
    return jax.tree.map(bound, finite(change_by(*[mean] * count)), mean)


def finite(change: Tree) -> Any:
    """Returns a change with zeros in place of what is not finite."""
    return jax.tree.map(lambda u: jnp.where(jnp.isfinite(u), u, 0), change)


def _within(slope: jax.Array, bound: jax.Array) -> jax.Array:
    bound = bound.astype(slope.dtype)
    return jnp.clip(slope, -bound, bound)
