"""The largest stable curvature or learning rate, by the roots of a polynomial.

A root leaves the unit circle at curvature `lambda` where `p(z) + lambda q(z) = 0` with
`|z| = 1`, so where `-p(z) / q(z)` is real. On the circle the conjugate of `p(z)` is
`p(1 / z)`, and "is real" is a polynomial's being zero:

  `p(z) q(1/z) - p(1/z) q(z) = 0`

Its roots on the circle, polished, give every curvature at which stability may change;
the first at which it does is the limit. No grid is searched, so none is missed.
"""

import itertools
from collections.abc import Callable

import numpy as np
import optax

from pipejax.train_step import check_feedback, check_flag, check_width

from ._linear import linear_update
from ._loop import Loop, deviations, loop

Optimizer = Callable[[float], optax.GradientTransformation]


def spectral_radius(
    tx: optax.GradientTransformation,
    width: int,
    curvature: float,
    *,
    weight_prediction: bool = True,
    deviation_feedback: float = 0.0,
) -> float:
    """By what factor a step at most multiplies the distance to the optimum, in the end.

    The largest absolute root of the characteristic polynomial:

    - of a plain delay: of `w[t] = w[t-1] - u(g[t-K])`, `g[t] = curvature w[t]`
    - with weight prediction: that of width 1, or of the deviations `e_i = g_i - g` of
      devices' gradients from their mean, whichever is larger. Device i takes its
      gradient where its own gradients in flight lead, so
      `e_i[t] = -curvature (u(e_i[t-K+1]) + ... + u(e_i[t-1])) + noise`, `u` beginning
      at nothing each time; with feedback c, `e_i[t-K+1] + c e_i[t-K]` is the oldest

    Args:
      tx: a linear Optax transformation; of a schedule its end counts.
      width: pipeline width K.
      curvature: second derivative of the loss, at least 0.
      weight_prediction: as of `pj.make_train_step`, on several devices. On one nothing
        deviates: its limits are those of width 1.
      deviation_feedback: as of `pj.make_train_step`.

    Returns:
      Below 1 the recursion converges, above it diverges.

    Raises:
      ValueError: if `tx` is not linear, or has a schedule that ends in 0, or if another
        argument breaks its rule.

    >>> import optax, pipejax as pj
    >>> f"{pj.stability.spectral_radius(optax.sgd(0.1), 2, curvature=8.0):.3f}"
    '0.800'
    """
    if not 0 <= curvature < np.inf:
        raise ValueError(
            f"`curvature` must be a finite number of at least 0, got {curvature!r}. A"
            " direction that curves down has no optimum to be stable about."
        )
    loops = _loops(tx, width, weight_prediction, deviation_feedback)
    return max(_radius(each, curvature) for each in loops)


def max_curvature(
    tx: optax.GradientTransformation,
    width: int,
    *,
    weight_prediction: bool = True,
    deviation_feedback: float = 0.0,
) -> float:
    """The curvature below which every quadratic is stable at this width.

    Args:
      tx: a linear Optax transformation, its learning rate included: a number, for of
        a schedule its end counts.
      width: pipeline width K.
      weight_prediction: as for `spectral_radius`.
      deviation_feedback: likewise.

    Returns:
      The limit of the largest eigenvalue of the Hessian; infinite if there is none, 0
      if no curvature is stable.

    Raises:
      ValueError: if `tx` is not linear, or has a schedule that ends in 0, or if another
        argument breaks its rule.

    >>> import optax, pipejax as pj
    >>> tx = optax.sgd(0.1, momentum=0.9)
    >>> for width in (1, 2, 3):
    ...     print(f"{pj.stability.max_curvature(tx, width):.2f}")
    38.00
    10.00
    5.26
    """
    loops = _loops(tx, width, weight_prediction, deviation_feedback)
    return min(map(_limit, loops))


def max_learning_rate(
    optimizer: Optimizer,
    width: int,
    *,
    curvature: float = 1.0,
    weight_prediction: bool = True,
    deviation_feedback: float = 0.0,
) -> float:
    """The learning rate below which a loss of this curvature is stable at this width.

    At K=1 for SGD `2 / curvature`, for heavy-ball `2 (1 + mu) / curvature`. With weight
    prediction `1 / curvature` for both at K=2, and at K=3 `1 / curvature` for SGD and
    `1 / (1 + mu) / curvature` for heavy-ball. Of a plain delay for SGD
    `2 sin(pi / (4 K - 2)) / curvature`, for heavy-ball `(1 - mu) / curvature` at K=2.

    Args:
      optimizer: from a learning rate to a linear Optax transformation whose updates are
        proportional to it: `functools.partial(optax.sgd, momentum=0.9)`.
      width: pipeline width K.
      curvature: the largest eigenvalue of the loss's Hessian, above 0. That of a
        network grows in training until it meets the limit (Cohen et al. 2021,
        https://arxiv.org/abs/2103.00065): measure it with `sharpness`, or compare two
        widths at 1.
      weight_prediction: as for `spectral_radius`.
      deviation_feedback: likewise.

    Returns:
      The limit, in the units of `optimizer`'s argument.

    Raises:
      ValueError: if `optimizer` is not linear or not proportional to its learning rate,
        or another argument breaks its rule.

    >>> import functools, optax, pipejax as pj
    >>> momentum = functools.partial(optax.sgd, momentum=0.9)
    >>> for width in (1, 2):
    ...     print(f"{pj.stability.max_learning_rate(momentum, width):.2f}")
    3.80
    1.00
    """
    if not curvature > 0:
        raise ValueError(
            f"`curvature` must be a number above 0, got {curvature!r}: the largest"
            " eigenvalue of the loss's Hessian, or 1 to compare widths."
        )
    limit, half = (
        max_curvature(
            optimizer(rate),
            width,
            weight_prediction=weight_prediction,
            deviation_feedback=deviation_feedback,
        )
        for rate in (1.0, 0.5)
    )
    if not np.isclose(half, 2 * limit, rtol=1e-6):
        raise ValueError(
            "`optimizer` must give updates proportional to its learning rate; got one"
            f" stable up to curvature {limit:.6g} at 1 and {half:.6g} at 0.5. Ask"
            " pj.stability.max_curvature about the transformation itself."
        )
    return limit / curvature


def _loops(
    tx: optax.GradientTransformation,
    width: int,
    weight_prediction: bool,
    deviation_feedback: float,
) -> list[Loop]:
    """What has to be stable, each by itself."""
    update, width = linear_update(tx), check_width(width)
    check_flag("weight_prediction", weight_prediction)
    feedback = check_feedback(deviation_feedback, weight_prediction)
    if not weight_prediction:
        return [loop(update, width)]
    apart = [deviations(update, width, feedback)] if width > 1 else []
    return [loop(update, 1), *apart]


def _limit(of: Loop) -> float:
    edges = [0.0, *_crossings(of)]
    # Between two edges stability is the same, so one point tells of all.
    between = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    beyond = 2 * edges[-1] + 1
    for low, point in zip(edges, [*between, beyond], strict=True):
        if _radius(of, point) > 1:
            return low
    return np.inf


def _crossings(of: Loop) -> list[float]:
    """Every curvature above 0 at which a root is on the unit circle, ascending."""
    from scipy.optimize import newton  # slow to import

    p, q = of.polynomials()

    def imaginary(angle: float) -> float:
        z = np.exp(1j * angle)
        return float(np.imag(np.polyval(p, z) * np.conj(np.polyval(q, z))))

    roots = np.roots(np.polysub(np.polymul(p, q[::-1]), np.polymul(p[::-1], q)))
    # Roots that lie close together are found to few digits: they are polished below.
    # One too many, from off the circle, adds an edge at which nothing changes.
    angles = np.abs(np.angle(roots[np.abs(np.abs(roots) - 1) < 1e-2]))
    inner = angles[(angles > 1e-6) & (angles < np.pi - 1e-6)]
    polished = [newton(imaginary, x, x1=x * (1 + 1e-4), disp=False) for x in inner]
    z = np.append(np.exp(1j * np.array(polished)), [-1, 1])
    numerator, denominator = np.polyval(p, z), np.polyval(q, z)
    meets = np.abs(denominator) > 1e-12 * np.abs(q).max()
    curvatures = np.sort(np.real(-numerator[meets] / denominator[meets]))
    # A root and its conjugate give one edge, twice; one at 0 is there without a loss.
    apart = np.diff(curvatures, prepend=0.0) > 1e-6 * np.abs(curvatures)
    least = 1e-9 * np.abs(p).max() / (np.abs(q).max() or 1)
    return [float(x) for x in curvatures[apart & (curvatures > least)]]


def _radius(of: Loop, curvature: float) -> float:
    return float(np.abs(np.linalg.eigvals(of.matrix(curvature))).max())
