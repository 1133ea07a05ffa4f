"""A reduced message, and whether an update by it is applied.

An update has one such part, or two if some of its gradients are not delayed
(`_delayed`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pipejax._core.message import Reduced, mean_of


class Part(NamedTuple):
    """A reduced message, and what is done with it.

    Attributes:
      reduced: The reduced message.
      applies: bool scalar, whether the update by it is applied.
      skips: bool scalar, whether it is skipped, because it is not finite.
    """

    reduced: Reduced
    applies: jax.Array
    skips: jax.Array


def decided(reduced: Reduced, *, skip_nonfinite: bool) -> Part:
    """Decides from a reduced message alone, as every replica does."""
    counts = reduced.counts
    skips = counts & ~reduced.finite if skip_nonfinite else jnp.zeros((), jnp.bool_)
    return Part(reduced, counts & ~skips, skips)


def norm_of_both(late: Part, rest: Part, devices: int) -> jax.Array:
    """Returns the norm of the gradient that the optimizer is given.

    Where a parameter has both parts of a gradient, it is that of their sum. If nothing
    is applied, it is the norm of all that has come.
    """
    norms = [mean_of(x.reduced.norm, x.reduced.sum, devices) for x in (late, rest)]
    none = ~(late.applies | rest.applies)
    late_counts, rest_counts = late.applies | none, rest.applies | none
    squares = (
        jnp.where(late_counts, norms[0] ** 2, 0)
        + jnp.where(rest_counts, norms[1] ** 2, 0)
        + jnp.where(late_counts & rest_counts, 2 * _inner(late, rest, devices), 0)
    )
    return jnp.sqrt(jnp.maximum(squares, 0))


def _inner(late: Part, rest: Part, devices: int) -> jax.Array:
    """Returns the inner product of both mean gradients, where parameters have both."""
    both = [
        jax.tree.leaves(part.reduced.sum.gradients, is_leaf=lambda x: x is None)
        for part in (late, rest)
    ]
    pairs = [(a, b) for a, b in zip(*both, strict=True) if not (a is None or b is None)]
    found = sum(
        (jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32)) for a, b in pairs),
        start=jnp.float32(0),
    )
    return mean_of(mean_of(found, late.reduced.sum, devices), rest.reduced.sum, devices)
