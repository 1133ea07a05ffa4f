"""Quadratics with a chosen spectrum and a chosen amount of gradient noise."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax._internal.integers import is_integer
from pipejax._internal.numbers import number

from ._problem import Problem


def quadratic(
    spectrum: Any, *, noise: float = 0.0, size: int = 1024, seed: int = 0
) -> Problem:
    """Makes a quadratic with a chosen spectrum and chosen gradient noise.

    $$f(w, x) = 1/2 (w - w_*)^T A (w - w_*) - x^T (w - w_*)$$

    The optimum `w_*` is random, and the examples x have mean 0. The gradient of an
    example is `A (w - w_*) - x`, so its noise is `-x` and does not depend on w. The
    eigenvectors of A are random and independent of the noise. Use this problem to test
    a claim about given curvatures, such as a limit from `pj.stability`.

    Args:
      spectrum: Eigenvalues of A, finite and at least 0, float array [d].
      noise: Standard deviation of each element of x, a finite number of at least 0.
      size: Number of examples, at least 2.
      seed: Seed for the eigenvectors of A, the optimum and the noise.

    Returns:
      A `Problem` with parameters w, float [d].

    Raises:
      ValueError: If an argument breaks its rule.

    Examples:
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
    if not 0 <= number(noise) < np.inf:
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
