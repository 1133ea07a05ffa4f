"""A convex objective together with the constants that convergence theorems use."""

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
    r"""A convex objective F, the mean of a loss f over n examples.

    $$F(w) = 1/n \sum_j f(w, example_j)$$

    Because the optimum is known, `excess` measures exactly how far the loss of a run is
    above the minimum, and a test can compare a run with the bound of a theorem.
    `pj.make_train_step` takes the loss function as it is.

    Attributes:
      loss_fn: `loss_fn(w, batch) -> scalar`, the mean of f over the batch.
      examples: Pytree of float64 or integer arrays [n, ...].
      optimum: Float64 array of the shape of w, a point at which F is minimal.
      strong_convexity: Lower bound on the eigenvalues of the Hessian of F. It is 0 if F
        may be flat in some direction.
      smoothness: Upper bound on the eigenvalues of the Hessian of F. It is infinite if
        the gradient of F jumps.
      lipschitz: A function `lipschitz(radius) -> float`. It returns an upper bound on
        the norm of the gradient of f, for any single example and any w at a distance of
        at most `radius` from the optimum.
    """

    loss_fn: Loss
    examples: Any
    optimum: np.ndarray
    strong_convexity: float
    smoothness: float
    lipschitz: Callable[[float], float]

    @property
    def size(self) -> int:
        """Returns n, the number of examples."""
        return int(jax.tree.leaves(self.examples)[0].shape[0])

    @functools.cached_property
    def minimum(self) -> float:
        """Returns the value of F at the optimum."""
        return self.value(self.optimum)

    def value(self, w: Any) -> float:
        """Returns `F(w)` over all examples, computed in float64."""
        with jax.enable_x64(True):
            return float(self.loss_fn(jnp.asarray(w, jnp.float64), self.examples))

    def excess(self, w: Any) -> float:
        """Returns `F(w) - min F`, which is at least 0 up to rounding."""
        return self.value(w) - self.minimum

    def batch(self, indices: np.ndarray) -> Any:
        """Returns the examples at `indices` as a batch; floating arrays are float32."""
        return jax.tree.map(lambda x: _narrow(x[indices]), self.examples)


def _narrow(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if np.issubdtype(x.dtype, np.floating) else x
