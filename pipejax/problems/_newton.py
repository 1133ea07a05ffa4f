"""The optimum of a smooth strictly convex function, to rounding, by Newton's method."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.sparse.linalg import cg

TOLERANCE = 1e-11  # of the gradient's norm, beside 1 or that at the start
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
      A float64 array, where the gradient's norm is at most `TOLERANCE`, or where it is
      above 1 at the start that much of it.

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
        enough = TOLERANCE * max(1.0, float(jnp.linalg.norm(g)))
        for _ in range(_ROUNDS):
            if (norm := float(jnp.linalg.norm(g))) <= enough:
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
        "`x` and `y` must have an optimum that Newton's method finds: the gradient fell"
        f" to {norm:.3g}, not to {enough:.3g}. Give an `l2`, or a larger one, or scale"
        " the features."
    )
