"""Newton's method for a smooth, strictly convex function, exact up to rounding."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.sparse.linalg import cg

# Limit on the norm of the gradient: absolute, or relative to the norm at the start if
# that norm is above 1. The function is to have a curvature of about 1.
TOLERANCE = 1e-11
_ROUNDS = 200
_HALVINGS = 40


def minimise(
    function: Callable[[jax.Array], jax.Array], start: np.ndarray
) -> np.ndarray:
    """Returns the point where the gradient of a strictly convex function vanishes."""
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(function))

        @jax.jit
        def direction(w: jax.Array, g: jax.Array) -> Any:
            def curve(v: jax.Array) -> jax.Array:
                return jax.jvp(jax.grad(function), (w,), (v,))[1]

            # A tolerance that shrinks with the gradient makes convergence superlinear.
            tolerance = jnp.minimum(0.1, jnp.linalg.norm(g))
            return cg(curve, -g, tol=tolerance, maxiter=20 * w.size)[0]

        w = jnp.asarray(start, jnp.float64)
        g = gradient(w)
        enough = TOLERANCE * max(1.0, float(jnp.linalg.norm(g)))
        for _ in range(_ROUNDS):
            if (norm := float(jnp.linalg.norm(g))) <= enough:
                return np.asarray(w)
            # Newton's direction d solves `H d = -g` for the Hessian H and the gradient
            # g. Along d the norm of the gradient decreases at first, wherever the
            # iteration starts, so the step is halved until the norm is smaller than
            # before.
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
        "`x` and `y` must have an optimum that Newton's method finds; the norm of the"
        f" gradient fell to {norm:.3g}, not to {enough:.3g}. Pass a larger `l2`, or"
        " remove features that nearly depend on others."
    )
