"""Quadratics of chosen spectrum, with noise of chosen size in the gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.integers import is_integer

from ._problem import Problem


def quadratic(
    spectrum: Any, *, noise: float = 0.0, size: int = 1024, seed: int = 0
) -> Problem:
    """`f(w, x) = 1/2 (w - w*)' A (w - w*) - x' w`, with examples x of mean 0.

    The gradient `A (w - w*) - x` has noise that does not depend on w, in a basis that
    has nothing to do with A's.

    Args:
      spectrum: eigenvalues of A, at least 0, shape [d].
      noise: standard deviation of each element of x.
      size: number of examples, at least 2.
      seed: of the basis, the optimum and the noise.

    Returns:
      A `Problem` of parameters [d].

    Raises:
      ValueError: if an argument breaks its rule.

    >>> import pipejax as pj
    >>> problem = pj.problems.quadratic([1.0, 10.0])
    >>> print(problem.smoothness, problem.excess(problem.optimum))
    10.0 0.0
    """
    eigenvalues = np.asarray(spectrum, np.float64)
    allowed = (eigenvalues >= 0) & np.isfinite(eigenvalues)
    if eigenvalues.ndim != 1 or not eigenvalues.size or not allowed.all():
        raise ValueError(
            "`spectrum` must be a vector of finite eigenvalues of at least 0, got"
            f" {spectrum!r}."
        )
    if not 0 <= noise < np.inf:
        raise ValueError(
            f"`noise` must be a finite number of at least 0, got {noise!r}."
        )
    if not is_integer(size, 2):
        raise ValueError(
            f"`size` must be an integer of at least 2 examples, got {size!r}."
        )
    rng = np.random.default_rng(seed)
    d = eigenvalues.size
    basis, _ = np.linalg.qr(rng.normal(size=(d, d)))
    matrix, optimum = basis * eigenvalues @ basis.T, rng.normal(size=d)
    x = rng.normal(size=(size, d))
    x = noise * (x - x.mean(axis=0))

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        away = w - jnp.asarray(optimum, w.dtype)
        curved = 0.5 * away @ jnp.asarray(matrix, w.dtype) @ away
        return curved - batch.mean(axis=0) @ away

    largest = float(eigenvalues.max())
    noisiest = float(np.linalg.norm(x, axis=1).max())
    return Problem(
        loss_fn=loss_fn,
        examples=x,
        optimum=optimum,
        strong_convexity=float(eigenvalues.min()),
        smoothness=largest,
        lipschitz=lambda radius: largest * radius + noisiest,
    )
