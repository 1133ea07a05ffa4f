"""The bound: the largest distance to which rounding errors may lead a loop.

Two programs for the same loop differ in how they round. In floating point, a sum of n
products, added in any order, equals the exact sum of products that are each changed by
a relative amount of at most

  `gamma = n u / (1 - n u)`,  `u = 2^-24`

(Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1). A computed
gradient is therefore the exact gradient at slightly different parameters and data. An
update takes fewer operations than the longest sum has terms, and is rounded in the same
way. How much such changes grow in later steps depends on the optimizer.

For this reason, the twin runs `RUNS` more times, with disturbances. Each time, these
numbers are changed up or down at random:

- by gamma: every parameter and every input of a gradient, every gradient with its
  passengers, and every number of the optimizer's state
- by u: every updated parameter

The bound is the largest distance of these runs from the undisturbed run. The sizes of
the changes are derived, and each is the largest possible. How they add up is sampled.
The bound is not multiplied by any factor.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._pieces import Pieces, State

RUNS = 16
UNIT = 2.0**-24


def gamma(terms: int) -> float:
    """Returns the largest relative change of a term in a sum of `terms` terms."""
    return terms * UNIT / (1 - terms * UNIT)


def disturbed(pieces: Pieces, terms: int, rng: np.random.Generator) -> Pieces:
    """Returns the pieces of a loop with the largest possible rounding errors.

    Args:
      pieces: The pieces of the undisturbed loop.
      terms: The number of terms in the longest sum.
      rng: Decides which numbers are changed up and which are changed down.
    """
    size = gamma(terms)

    def computing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(state: State, inputs: Any) -> Any:
            state = state._replace(params=changed(state.params, size, rng))
            inputs = inputs._replace(
                batch=changed(inputs.batch, size, rng),
                shared=changed(inputs.shared, size, rng),
            )
            message = function(state, inputs)
            return changed(message, size, rng)._replace(weight=message.weight)

        return call

    def update(state: State, message: Any) -> State:
        after = pieces.update(state, message)
        return after._replace(
            params=changed(after.params, UNIT, rng),
            opt_state=changed(after.opt_state, size, rng),
        )

    return pieces._replace(
        whole=computing(pieces.whole) if pieces.whole else None,
        own=computing(pieces.own),
        update=update,
    )


def changed(tree: Any, size: float, rng: np.random.Generator) -> Any:
    """Returns `x (1 + size)` or `x (1 - size)`, at random, for floating-point `x`."""

    def change(x: Any) -> Any:
        if not jax.numpy.issubdtype(jax.numpy.result_type(x), np.floating):
            return x
        x = np.asarray(x)
        signs = rng.integers(2, size=x.shape, dtype=np.int8) * 2 - 1
        return (x.astype(np.float64) * (1 + size * signs)).astype(x.dtype)

    return jax.tree.map(change, tree)


def distance(a: Any, b: Any) -> float:
    """Returns the largest difference of two pytrees; NaN equals only NaN."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max((_largest(np.asarray(x), np.asarray(y)) for x, y in pairs), default=0.0)


def _largest(x: np.ndarray, y: np.ndarray) -> float:
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    if same.all():
        return 0.0
    difference = np.abs(x[~same].astype(np.float64) - y[~same])
    return float(np.nan_to_num(difference, nan=np.inf).max())
