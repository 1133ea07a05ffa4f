r"""Linear models of given data: three smooth losses and two losses with a kink.

Each objective F is a mean over n examples of features `x_j` and targets `y_j`:

$$F(w) = 1/n \sum_j f(w, (x_j, y_j))$$

A linear program finds the optimum of `absolute` and `hinge`, which have a kink. The
other three take an argument `l2` and add the regularization `l2/2 |w|^2` to f.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pipejax._internal.numbers import number

from ._newton import minimise
from ._problem import Loss, Problem

LinearLoss = Callable[[Any, Any], jax.Array]  # of predictions `x @ w` and targets
Data = tuple[np.ndarray, np.ndarray, float]  # features, targets and l2
Row = tuple[np.ndarray, np.ndarray]


def least_squares(x: Any, y: Any, *, l2: float = 0.0) -> Problem:
    r"""Makes a least-squares problem, or ridge regression with `l2 > 0`.

    $$f(w, (x, y)) = 1/2 (w^T x - y)^2 + \lambda/2 |w|^2$$

    The curvature is the same everywhere, so the constants `strong_convexity` and
    `smoothness` are exact. Those of `logistic` and `softmax` are bounds.

    Args:
      x: Features, float array [n, d].
      y: Targets, float array [n].
      l2: Strength lambda of the regularization, a finite number of at least 0.

    Returns:
      A `Problem` with parameters w, float [d].

    Raises:
      ValueError: If an argument breaks its rule, or if the optimum is not unique.

    Examples:
      >>> import pipejax as pj
      >>> problem = pj.problems.least_squares([[1.0], [1.0], [1.0]], [1.0, 2.0, 9.0])
      >>> print(f"{problem.optimum[0]:.2f} {problem.smoothness:.2f}")  # the mean
      4.00 1.00
    """
    x, y = _checked(x, y, l2)
    gram = x.T @ x / len(x) + l2 * np.eye(x.shape[1])
    eigenvalues = np.linalg.eigvalsh(gram)
    if not eigenvalues[0] > 1e-12 * eigenvalues[-1]:
        raise ValueError(
            "`x` must have independent features, or `l2` must be above 0, so that the"
            " optimum is unique; got a Hessian with eigenvalues from"
            f" {eigenvalues[0]:.3g} to {eigenvalues[-1]:.3g}. Remove dependent"
            " features, or pass l2=1e-3."
        )
    optimum = np.linalg.solve(gram, x.T @ y / len(x))
    norms, residuals = np.linalg.norm(x, axis=1), np.abs(x @ optimum - y)
    return _problem(
        lambda prediction, y: 0.5 * (prediction - y) ** 2,
        (x, y, l2),
        optimum,
        curvature=(float(eigenvalues[0]), float(eigenvalues[-1])),
        slope=lambda radius: float((norms * (residuals + norms * radius)).max()),
    )


def absolute(x: Any, y: Any) -> Problem:
    """Makes a problem of least absolute deviations, which is convex but not smooth.

    $$f(w, (x, y)) = |w^T x - y|$$

    Args:
      x: Features, float array [n, d].
      y: Targets, float array [n].

    Returns:
      A `Problem` with parameters w, float [d]. Its `strong_convexity` is 0 and its
      `smoothness` is infinite.

    Raises:
      ValueError: If an argument breaks its rule, or if the linear-program solver finds
        no optimum.

    Examples:
      >>> import pipejax as pj
      >>> problem = pj.problems.absolute([[1.0], [1.0], [1.0]], [1.0, 2.0, 9.0])
      >>> print(f"{problem.optimum[0]:.2f}")  # the median
      2.00
    """
    x, y = _checked(x, y)
    # |r| is the smallest s with s >= r and s >= -r.
    rows = [(x, y), (-x, -y)]
    return _with_kink(lambda prediction, y: jnp.abs(prediction - y), x, y, rows)


def hinge(x: Any, y: Any) -> Problem:
    r"""Makes a linear support vector machine without L2 regularization.

    $$f(w, (x, y)) = \max(0, 1 - y w^T x)$$

    Unlike `logistic`, it has an optimum even where a plane separates the labels.

    Args:
      x: Features, float array [n, d].
      y: Labels -1 and 1, array [n].

    Returns:
      A `Problem` with parameters w, float [d]. Its `strong_convexity` is 0 and its
      `smoothness` is infinite.

    Raises:
      ValueError: If an argument breaks its rule, or if the linear-program solver finds
        no optimum.

    Examples:
      >>> import pipejax as pj
      >>> problem = pj.problems.hinge([[1.0], [1.0], [1.0]], [1, 1, -1])
      >>> print(f"{problem.optimum[0]:.2f} {problem.minimum:.2f}")
      1.00 0.67
    """
    x, y = _checked(x, y)
    _check_signs(y)
    # max(0, 1 - m) is the smallest s >= 0 with s >= 1 - m.
    rows = [(-y[:, None] * x, -np.ones(len(x)))]
    return _with_kink(lambda score, y: jnp.maximum(0, 1 - y * score), x, y, rows)


def logistic(x: Any, y: Any, *, l2: float = 0.0) -> Problem:
    r"""Makes a logistic regression with two classes; `softmax` takes more.

    $$f(w, (x, y)) = \log(1 + \exp(-y w^T x)) + \lambda/2 |w|^2$$

    Args:
      x: Features, float array [n, d].
      y: Labels -1 and 1, array [n].
      l2: Strength lambda of the regularization, a finite number of at least 0. It must
        be above 0 if a plane separates the labels: otherwise there is no optimum,
        because the loss falls forever as w grows.

    Returns:
      A `Problem` with parameters w, float [d]. Its `strong_convexity` is `l2`.

    Raises:
      ValueError: If an argument breaks its rule, if `l2` is 0 and a plane separates the
        labels, or if Newton's method finds no optimum.

    Examples:
      >>> import pipejax as pj
      >>> x, y = [[1.0], [1.0], [1.0], [1.0]], [1, 1, 1, -1]
      >>> print(f"{pj.problems.logistic(x, y).optimum[0]:.2f}")  # log(3)
      1.10
    """
    x, y = _checked(x, y, l2)
    _check_signs(y)
    if l2 == 0 and _separable(x, y):
        raise ValueError(
            "`l2` must be above 0 where a plane separates the labels, got 0. The loss"
            " then falls forever as `w` grows. Pass l2=1e-3."
        )
    return _smooth(
        lambda score, y: jax.nn.softplus(-y * score),
        (x, y, l2),
        shape=(x.shape[1],),
        curvature=0.25,
        slope=1.0,
    )


def softmax(x: Any, y: Any, *, l2: float) -> Problem:
    r"""Makes a multinomial logistic regression with any number of classes.

    $$f(w, (x, y)) = -\log softmax(w^T x)_y + \lambda/2 |w|^2$$

    Args:
      x: Features, float array [n, d].
      y: Labels 0, 1, 2, ..., integer array [n]. The largest label determines the number
        of classes.
      l2: Strength lambda of the regularization, a finite number above 0. Without it the
        optimum is not unique: a constant added to the scores of all classes does not
        change the loss.

    Returns:
      A `Problem` with parameters w, float [d, classes]. Its `strong_convexity` is `l2`.

    Raises:
      ValueError: If an argument breaks its rule, or if Newton's method finds no
        optimum.

    Examples:
      >>> import pipejax as pj
      >>> x, y = [[1.0], [1.0], [1.0], [1.0]], [0, 0, 0, 1]
      >>> problem = pj.problems.softmax(x, y, l2=0.1)
      >>> print(problem.optimum.round(2).tolist(), f"{problem.smoothness:.2f}")
      [[0.44, -0.44]] 0.60
    """
    x, y = _checked(x, y, l2)[0], np.asarray(y)
    if not np.issubdtype(y.dtype, np.integer) or y.min() < 0:
        raise ValueError(
            f"`y` must be integer labels from 0; got dtype {y.dtype.name} with smallest"
            f" label {y.min()}. Pass np.unique(y, return_inverse=True)[1]."
        )
    if l2 == 0:
        raise ValueError(
            "`l2` must be above 0, got 0. A constant added to the scores of all classes"
            " does not change the loss, so the optimum is not unique. Pass l2=1e-3."
        )
    return _smooth(
        optax.softmax_cross_entropy_with_integer_labels,
        (x, y, l2),
        shape=(x.shape[1], int(y.max()) + 1),
        # The Hessian in the scores is the covariance of a one-hot vector, whose
        # eigenvalues are at most 1/2. The gradient in the scores is softmax minus
        # one-hot, whose norm is at most sqrt(2).
        curvature=0.5,
        slope=float(np.sqrt(2)),
    )


def _loss_fn(loss: LinearLoss, l2: float) -> Loss:
    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        x, y = batch
        return loss(x @ w, y).mean() + 0.5 * l2 * jnp.vdot(w, w)

    return loss_fn


def _problem(
    loss: LinearLoss,
    data: Data,
    optimum: np.ndarray,
    curvature: tuple[float, float],
    slope: Callable[[float], float],
) -> Problem:
    """Makes a problem whose `loss` has a gradient of norm `slope(radius)` at most."""
    x, y, l2 = data
    # The gradient of the regularization grows with the distance from the origin.
    distance = float(np.linalg.norm(optimum))
    return Problem(
        loss_fn=_loss_fn(loss, l2),
        examples=(x, y),
        optimum=optimum,
        strong_convexity=curvature[0],
        smoothness=curvature[1],
        lipschitz=lambda radius: slope(radius) + l2 * (distance + radius),
    )


def _smooth(
    loss: LinearLoss,
    data: Data,
    *,
    shape: tuple[int, ...],
    curvature: float,
    slope: float,
) -> Problem:
    """Makes a problem from a smooth loss.

    `curvature` and `slope` bound the second and first derivative of `loss` in its first
    argument, the prediction `x @ w`.
    """
    x, y, l2 = data
    loss_fn = _loss_fn(loss, l2)
    # Newton's tolerance is absolute. For `v = units * w`, neither the features nor `l2`
    # are far above 1, and one of them is about 1 in each column.
    units = np.maximum(_magnitudes(x), np.sqrt(l2)).reshape(-1, *[1] * (len(shape) - 1))
    optimum = minimise(lambda v: loss_fn(v / units, (x, y)), np.zeros(shape)) / units
    steepest = slope * float(np.linalg.norm(x, axis=1).max())
    largest = curvature * float(np.linalg.norm(x, ord=2)) ** 2 / len(x) + l2
    return _problem(loss, data, optimum, (l2, largest), lambda radius: steepest)


def _with_kink(
    loss: LinearLoss, x: np.ndarray, y: np.ndarray, rows: list[Row]
) -> Problem:
    """Makes a problem from a loss whose slope in its prediction is at most 1."""
    optimum = _least(rows)
    steepest = float(np.linalg.norm(x, axis=1).max())
    limits = (0.0, np.inf)
    return _problem(loss, (x, y, 0.0), optimum, limits, lambda radius: steepest)


def _least(rows: list[Row]) -> np.ndarray:
    """Returns the w that minimizes `sum s`, by linear programming."""
    from scipy import optimize, sparse  # slow to import

    n, d = rows[0][0].shape
    # The solver drops entries below 1e-9 and ignores errors below 1e-7. Each column is
    # therefore divided by its magnitude, and the bounds by theirs.
    columns, bound = _magnitudes(rows[0][0]), np.concatenate([b for _, b in rows])
    size = _magnitudes(bound)
    # The unknowns are w and then s. A row says `a w - s <= b`, that is `a w - b <= s`.
    scaled = [sparse.hstack([a / columns, -sparse.eye(n)]) for a, _ in rows]
    solved = optimize.linprog(
        np.concatenate([np.zeros(d), np.ones(n)]),
        A_ub=sparse.vstack(scaled).tocsr(),
        b_ub=bound / size,
        bounds=[(None, None)] * d + [(0, None)] * n,
        method="highs",
    )
    if not solved.success:
        raise ValueError(
            "`x` and `y` must have an optimum that a linear-program solver finds; got"
            f" the answer: {solved.message} Scale the features."
        )
    return np.asarray(solved.x[:d] * size / columns)


def _magnitudes(x: np.ndarray) -> np.ndarray:
    """Returns for each column a power of two, by which a division is exact.

    The largest magnitude of a column, if it is not 0, is from 1 to 2 of these.
    """
    return np.exp2(np.frexp(np.abs(x).max(axis=0))[1] - 1.0)


def _separable(x: np.ndarray, y: np.ndarray) -> bool:
    """Returns whether some w has `y w^T x >= 0` everywhere, and above 0 somewhere."""
    from scipy import optimize  # slow to import

    # The sum of the margins is above 0 only if some margin is, since none may be below
    # 0. The bounds on w keep the sum finite: only the direction of w counts.
    margins = y[:, None] * x / _magnitudes(x)
    solved = optimize.linprog(
        -margins.sum(axis=0),
        A_ub=-margins,
        b_ub=np.zeros(len(x)),
        bounds=[(-1, 1)] * x.shape[1],
        method="highs",
    )
    return bool(solved.fun < -1e-9 * len(x))


def _checked(x: Any, y: Any, l2: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Returns features and targets in float64; raises a ValueError for bad ones."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.ndim != 2 or y.shape != x.shape[:1] or not x.size:
        raise ValueError(
            "`x` must have shape [n, d] and `y` shape [n], with at least one example"
            f" and one feature; got {x.shape} and {y.shape}."
        )
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("`x` and `y` must be finite, got NaN or infinity in them.")
    if not 0 <= number(l2) < np.inf:
        raise ValueError(f"`l2` must be a finite number of at least 0, got {l2!r}.")
    return x, y


def _check_signs(y: np.ndarray) -> None:
    if not np.isin(y, (-1, 1)).all():
        raise ValueError(
            f"`y` must hold the labels -1 and 1, got {np.unique(y)[:5]}. For labels 0"
            " and 1, pass 2 * y - 1."
        )
