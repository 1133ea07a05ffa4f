"""The optimum of a smooth strictly convex function, to rounding, by Newton's method."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.sparse.linalg import cg

TOLERANCE = 1e-11  # of the gradient's norm
_ROUNDS = 200
_HALVINGS = 40


def minimise(
    function: Callable[[jax.Array], jax.Array], start: np.ndarray
) -> np.ndarray:
    """Where the gradient of `function` vanishes.

    Newton's direction d solves `H d = -g`, by conjugate gradients. Along it the norm of
    the gradient falls at first, whatever the start, so a step is halved until it does.

    Args:
      function: smooth and strictly convex, of one array.
      start: where to begin.

    Returns:
      A float64 array, where the gradient's norm is at most `TOLERANCE`.

    Raises:
      ValueError: if the gradient does not fall so far.
    """
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(function))

        @jax.jit
        def direction(w: jax.Array, g: jax.Array) -> Any:
            def curve(v: jax.Array) -> jax.Array:
                return jax.jvp(jax.grad(function), (w,), (v,))[1]

            # Superlinear: the closer, the more exact.
            tolerance = jnp.minimum(0.1, jnp.linalg.norm(g))
            return cg(curve, -g, tol=tolerance, maxiter=20 * w.size)[0]

        w = jnp.asarray(start, jnp.float64)
        g = gradient(w)
        for _ in range(_ROUNDS):
            if (norm := float(jnp.linalg.norm(g))) <= TOLERANCE:
                return np.asarray(w)
            step = direction(w, g)
            for halvings in range(_HALVINGS):
                after = w + step / 2**halvings
                g = gradient(after)
                if float(jnp.linalg.norm(g)) < norm:
                    break
            else:
                break
            w = after
    raise ValueError(
        f"`function` must have an optimum that Newton's method finds: its gradient fell"
        f" to {norm:.3g}, not to {TOLERANCE:g}. Add L2 regularisation, or scale the"
        " features."
    )
