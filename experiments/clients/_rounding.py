"""The bound: how far rounding errors may lead a loop away from itself.

Two programs for the same loop differ in how they round. A sum of n products in floating
point is the exact sum of products each of which is changed by a relative

  `gamma = n u / (1 - n u)`,  `u = 2^-24`

at most, whatever their order (Higham, Accuracy and Stability of Numerical Algorithms,
2002, section 3.1). So a computed gradient is that of slightly other parameters and
data, and an update, which takes fewer operations than the longest sum has terms, is
rounded likewise. How far such changes lead in later steps depends on the optimizer. The
twin therefore runs `RUNS` times more. Each time every parameter and input that a
gradient is taken of, every gradient, and every number of the optimizer's state is
changed up or down by gamma, as chance will have it, and every updated parameter by u.
The largest distance of such a run from the undisturbed one is the bound.

The sizes of the changes are derived, and all are the largest possible; how they add up
is sampled. No factor is put on the outcome.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._pieces import Pieces, State

RUNS = 16
UNIT = 2.0**-24


def gamma(terms: int) -> float:
    """Returns the largest relative change of a term in a sum of so many."""
    return terms * UNIT / (1 - terms * UNIT)


def disturbed(pieces: Pieces, terms: int, rng: np.random.Generator) -> Pieces:
    """Returns the pieces of a loop that rounds as badly as it may.

    Args:
      pieces: of the loop.
      terms: the largest number of terms in a sum.
      rng: decides which numbers are changed up and which down.
    """
    size = gamma(terms)

    def computing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(state: State, inputs: Any) -> Any:
            state = state._replace(params=changed(state.params, size, rng))
            inputs = inputs._replace(batch=changed(inputs.batch, size, rng))
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
        whole=computing(pieces.whole), own=computing(pieces.own), update=update
    )


def changed(tree: Any, size: float, rng: np.random.Generator) -> Any:
    """Returns `x (1 + size)` or `x (1 - size)`, by chance, for every floating x."""

    def change(x: Any) -> Any:
        if not jax.numpy.issubdtype(x.dtype, np.floating):
            return x
        x = np.asarray(x)
        signs = rng.integers(2, size=x.shape, dtype=np.int8) * 2 - 1
        return (x.astype(np.float64) * (1 + size * signs)).astype(x.dtype)

    return jax.tree.map(change, tree)


def distance(a: Any, b: Any) -> float:
    """Returns the largest difference of two pytrees; NaN differs from numbers only."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max((_largest(np.asarray(x), np.asarray(y)) for x, y in pairs), default=0.0)


def _largest(x: np.ndarray, y: np.ndarray) -> float:
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    if same.all():
        return 0.0
    difference = np.abs(x[~same].astype(np.float64) - y[~same])
    return float(np.nan_to_num(difference, nan=np.inf).max())
