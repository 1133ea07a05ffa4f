"""Compares the loops of a program: its own, the one by hand, and pipejax."""

from typing import Any

import jax
import numpy as np

from ._program import History, Program

ROUNDING = 2.0**-24


def compared(program: Program, seed: int) -> dict[str, Any]:
    """Trains a program in every way.

    Args:
      program: The program.
      seed: The seed of the disturbance.

    Returns:
      A dict for each width, which has the largest difference of `params` and of what is
      `reported` between pipejax and the loop that it is compared with, and `rounding`,
      the same differences between that loop and itself from disturbed parameters.
      `unit` is the last place of the largest number that is reported, in float32.
      Beside them, `scale` is the largest parameter, `moved` is how far the parameters
      move, and `apart` is the largest difference between the two loops of the program.
    """
    params = jax.tree.map(np.array, program.params)
    near = disturbed(params, np.random.default_rng(seed))
    one, two = program.original(params), program.delayed(params)
    ends = one.params[-1]
    return {
        "width 1": _row(program.converted(params, 1), one, program.original(near)),
        "width 2": _row(program.converted(params, 2), two, program.delayed(near)),
        "scale": distance(ends, jax.tree.map(np.zeros_like, ends)),
        "moved": distance(ends, params),
        "apart": distance(one.params, two.params[-len(one.params) :]),
    }


def disturbed(params: Any, rng: np.random.Generator) -> Any:
    """Returns parameters of which each is rounded up or down by one unit."""

    def near(x: np.ndarray) -> np.ndarray:
        return (x * (1 + ROUNDING * rng.choice([-2, 2], x.shape))).astype(x.dtype)

    return jax.tree.map(near, params)


def distance(a: Any, b: Any) -> float:
    """Returns the largest difference between two pytrees; NaN if any is NaN."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    found = [np.asarray(x, np.float64) - np.asarray(y, np.float64) for x, y in pairs]
    return float(np.max([np.abs(x).max(initial=0) for x in found]))


def unit(numbers: Any) -> float:
    """Returns the last place of the largest number of a pytree, in float32."""
    largest = max(np.abs(x).max(initial=0) for x in jax.tree.leaves(numbers))
    return float(np.spacing(np.float32(largest)))


def _row(ours: History, theirs: History, near: History) -> dict[str, Any]:
    return {
        "params": distance(ours.params, theirs.params),
        "reported": distance(ours.reported, theirs.reported),
        "rounding": {
            "params": distance(near.params, theirs.params),
            "reported": distance(near.reported, theirs.reported),
        },
        "unit": unit(theirs.reported),
    }
