"""A convex objective, with everything that a theorem about it asks for.

`F(w) = 1/n sum_j f(w, example_j)`: a loss, as `make_train_step` takes it, and examples.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Loss = Callable[[Any, Any], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A convex objective with its optimum and constants, of all examples.

    Attributes:
      loss_fn: `loss_fn(w, batch) -> scalar`, the mean of `f` over the batch.
      examples: pytree of float64 or int arrays [n, ...].
      optimum: float64 array of w's shape, a minimum of F.
      strong_convexity: least curvature of F, 0 if it may be flat.
      smoothness: greatest curvature of F; infinite if its slope jumps.
      lipschitz: from a radius to the largest norm of a gradient of `f`, of any example,
        that far from the optimum.
    """

    loss_fn: Loss
    examples: Any
    optimum: np.ndarray
    strong_convexity: float
    smoothness: float
    lipschitz: Callable[[float], float]

    @property
    def size(self) -> int:
        """n, the number of examples."""
        return int(jax.tree.leaves(self.examples)[0].shape[0])

    @functools.cached_property
    def minimum(self) -> float:
        """F at the optimum."""
        return self.value(self.optimum)

    def value(self, w: Any) -> float:
        """F at `w`, in float64."""
        with jax.enable_x64(True):
            return float(self.loss_fn(jnp.asarray(w, jnp.float64), self.examples))

    def excess(self, w: Any) -> float:
        """`F(w) - min F`, at least 0 up to rounding."""
        return self.value(w) - self.minimum

    def batch(self, indices: np.ndarray) -> Any:
        """These examples, in float32, as a train step takes them."""
        return jax.tree.map(lambda x: _narrow(x[indices]), self.examples)


def _narrow(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if np.issubdtype(x.dtype, np.floating) else x
