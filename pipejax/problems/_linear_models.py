"""Linear models of given data: squares, logistic, softmax; and two losses with a kink.

With features `x_j` and targets `y_j`, of all n examples:

- least squares: `1/2 (w x - y)^2`; ridge, with `l2 > 0`
- absolute: `|w x - y|`, hinge: `max(0, 1 - y w x)`: a linear program has their optimum
- logistic: `log(1 + exp(-y w x))`, y of -1 and 1
- softmax: `-log softmax(w' x)[y]`, of several classes

each with `l2 / 2 |w|^2` where it takes an `l2`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._newton import minimise
from ._problem import Loss, Problem


def least_squares(x: Any, y: Any, *, l2: float = 0.0) -> Problem:
    """`f(w, (x, y)) = 1/2 (w x - y)^2 + l2/2 |w|^2`; ridge regression with `l2 > 0`.

    Args:
      x: features [n, d].
      y: targets [n].
      l2: strength of the regularisation, at least 0.

    Returns:
      A `Problem` of parameters [d].

    Raises:
      ValueError: if an argument breaks its rule, or the optimum is not unique.
    """
    x, y = _checked(x, y, l2)
    gram = x.T @ x / len(x) + l2 * np.eye(x.shape[1])
    eigenvalues = np.linalg.eigvalsh(gram)
    if not eigenvalues[0] > 1e-12 * eigenvalues[-1]:
        raise ValueError(
            "`x` must have independent features, or `l2` be above 0, for one optimum;"
            f" got eigenvalues of {eigenvalues[0]:.3g} to {eigenvalues[-1]:.3g}."
        )
    optimum = np.linalg.solve(gram, x.T @ y / len(x))
    norms, residuals = np.linalg.norm(x, axis=1), np.abs(x @ optimum - y)

    def loss(prediction: jax.Array, y: jax.Array) -> jax.Array:
        return 0.5 * (prediction - y) ** 2

    def lipschitz(radius: float) -> float:
        return float((norms * (residuals + norms * radius)).max()) + _pull(
            l2, optimum, radius
        )

    return Problem(
        loss_fn=_loss_fn(loss, l2),
        examples=(x, y),
        optimum=optimum,
        strong_convexity=float(eigenvalues[0]),
        smoothness=float(eigenvalues[-1]),
        lipschitz=lipschitz,
    )


def absolute(x: Any, y: Any) -> Problem:
    """`f(w, (x, y)) = |w x - y|`, least absolute deviations: convex, not smooth.

    Args:
      x: features [n, d].
      y: targets [n].

    Returns:
      A `Problem` of parameters [d].

    Raises:
      ValueError: if an argument breaks its rule, or if a solver finds no optimum.
    """
    x, y = _checked(x, y)
    # |r| is the least s with s >= r and s >= -r.
    optimum = _least([(x, y), (-x, -y)])
    return _with_kink(lambda prediction, y: jnp.abs(prediction - y), x, y, optimum)


def hinge(x: Any, y: Any) -> Problem:
    """`f(w, (x, y)) = max(0, 1 - y w x)`, a linear support vector machine without L2.

    Args:
      x: features [n, d].
      y: labels [n], -1 or 1.

    Returns:
      A `Problem` of parameters [d].

    Raises:
      ValueError: if an argument breaks its rule, or if a solver finds no optimum.
    """
    x, y = _checked(x, y)
    _check_signs(y)
    # max(0, 1 - m) is the least s >= 0 with s >= 1 - m.
    optimum = _least([(-y[:, None] * x, -np.ones(len(x)))])
    return _with_kink(lambda score, y: jnp.maximum(0, 1 - y * score), x, y, optimum)


def logistic(x: Any, y: Any, *, l2: float = 0.0) -> Problem:
    """`f(w, (x, y)) = log(1 + exp(-y w x)) + l2/2 |w|^2`.

    Args:
      x: features [n, d].
      y: labels [n], -1 or 1.
      l2: strength of the regularisation, at least 0.

    Returns:
      A `Problem` of parameters [d].

    Raises:
      ValueError: if an argument breaks its rule, if without `l2` a plane separates the
        labels (the loss then falls for ever), or if Newton's method finds no optimum.
    """
    x, y = _checked(x, y, l2)
    _check_signs(y)
    if l2 == 0 and _separable(x, y):
        raise ValueError(
            "`l2` must be above 0 where a plane separates the labels, got 0: the loss"
            " falls for ever as `w` grows. Take l2=1e-3."
        )
    return _smooth(
        lambda score, y: jax.nn.softplus(-y * score),
        x,
        y,
        l2,
        shape=(x.shape[1],),
        curvature=0.25,
        slope=1.0,
    )


def softmax(x: Any, y: Any, *, l2: float) -> Problem:
    """`f(w, (x, y)) = -log softmax(w' x)[y] + l2/2 |w|^2`, multinomial regression.

    Args:
      x: features [n, d].
      y: integer labels [n], from 0.
      l2: strength of the regularisation, above 0: without it a constant added to all
        classes changes nothing, and the optimum is not unique.

    Returns:
      A `Problem` of parameters [d, classes].

    Raises:
      ValueError: if an argument breaks its rule, or if Newton's method finds no
        optimum.
    """
    x, y = _checked(x, y, l2)[0], np.asarray(y)
    if not np.issubdtype(y.dtype, np.integer) or y.min() < 0:
        raise ValueError(
            f"`y` must be integer labels from 0, got {y.dtype.name} from {y.min()}."
        )
    if l2 == 0:
        raise ValueError(
            "`l2` must be above 0, got 0: a constant added to the scores of all classes"
            " changes nothing, so there is no one optimum. Take l2=1e-3."
        )
    return _smooth(
        optax.softmax_cross_entropy_with_integer_labels,
        x,
        y,
        l2,
        shape=(x.shape[1], int(y.max()) + 1),
        # The covariance of one of several has eigenvalues of at most 1/2, and
        # |softmax - one-hot| is at most sqrt(2).
        curvature=0.5,
        slope=float(np.sqrt(2)),
    )


def _loss_fn(loss: Callable[[Any, Any], jax.Array], l2: float) -> Loss:
    """Of parameters and a batch of features and targets, with the regularisation."""

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        x, y = batch
        return loss(x @ w, y).mean() + 0.5 * l2 * jnp.vdot(w, w)

    return loss_fn


def _smooth(
    loss: Callable[[Any, Any], jax.Array],
    x: np.ndarray,
    y: np.ndarray,
    l2: float,
    *,
    shape: tuple[int, ...],
    curvature: float,
    slope: float,
) -> Problem:
    """A problem whose loss has at most this curvature and slope in its prediction."""
    loss_fn = _loss_fn(loss, l2)
    optimum = minimise(lambda w: loss_fn(w, (x, y)), np.zeros(shape))
    largest = float(np.linalg.norm(x, axis=1).max())
    return Problem(
        loss_fn=loss_fn,
        examples=(x, y),
        optimum=optimum,
        strong_convexity=l2,
        smoothness=curvature * float(np.linalg.norm(x, ord=2)) ** 2 / len(x) + l2,
        lipschitz=lambda radius: slope * largest + _pull(l2, optimum, radius),
    )


def _with_kink(
    loss: Callable[[Any, Any], jax.Array],
    x: np.ndarray,
    y: np.ndarray,
    optimum: np.ndarray,
) -> Problem:
    """A problem whose loss has slope 1 in its prediction, and a jump."""
    largest = float(np.linalg.norm(x, axis=1).max())
    return Problem(
        loss_fn=_loss_fn(loss, 0.0),
        examples=(x, y),
        optimum=optimum,
        strong_convexity=0.0,
        smoothness=np.inf,
        lipschitz=lambda radius: largest,
    )


def _pull(l2: float, optimum: np.ndarray, radius: float) -> float:
    """The largest gradient of the regularisation that far from the optimum."""
    return l2 * (float(np.linalg.norm(optimum)) + radius)


def _least(rows: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The w of the least `sum s` where `s >= a w - b` for all `(a, b)` and `s >= 0`."""
    from scipy import optimize, sparse  # slow to import

    n, d = rows[0][0].shape
    matrix = sparse.vstack([sparse.hstack([a, -sparse.eye(n)]) for a, _ in rows])
    bound = np.concatenate([b for _, b in rows])
    solved = optimize.linprog(
        np.concatenate([np.zeros(d), np.ones(n)]),
        A_ub=matrix.tocsr(),
        b_ub=bound,
        bounds=[(None, None)] * d + [(0, None)] * n,
        method="highs",
    )
    if not solved.success:
        raise ValueError(
            "`x` and `y` must have an optimum that a linear program's solver finds; it"
            f" says: {solved.message} Scale the features."
        )
    return np.asarray(solved.x[:d])


def _separable(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether some w has `y w x >= 0` everywhere, and above 0 somewhere."""
    from scipy import optimize  # slow to import

    margins = y[:, None] * x
    solved = optimize.linprog(
        -margins.sum(axis=0),
        A_ub=-margins,
        b_ub=np.zeros(len(x)),
        bounds=[(-1, 1)] * x.shape[1],
        method="highs",
    )
    return bool(solved.fun < -1e-9 * len(x))


def _checked(x: Any, y: Any, l2: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Features and targets in float64, or a ValueError."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.ndim != 2 or y.shape != x.shape[:1] or not x.size:
        raise ValueError(
            "`x` must have shape [n, d] and `y` [n], at least one of each; got"
            f" {x.shape} and {y.shape}."
        )
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("`x` and `y` must be finite, got NaN or infinity in them.")
    if not 0 <= l2 < np.inf:
        raise ValueError(f"`l2` must be a finite number of at least 0, got {l2!r}.")
    return x, y


def _check_signs(y: np.ndarray) -> None:
    if not np.isin(y, (-1, 1)).all():
        raise ValueError(
            f"`y` must be labels -1 and 1, got {np.unique(y)[:5]}. Of 0 and 1 take"
            " 2 * y - 1."
        )
