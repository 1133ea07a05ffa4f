r"""Limits of stability, from the roots of a characteristic polynomial.

Training on a quadratic of curvature `lambda` is stable while all roots z of the
polynomial `p(z) + lambda q(z)` of `_loop` lie inside the unit circle. At a curvature
where a root crosses the circle, `-p(z) / q(z)` is a real number for some z with
`|z| = 1`. The coefficients are real, so the complex conjugate of `p(z)` on the circle
is `p(1/z)`, and the condition is a polynomial equation in z:

$$p(z) q(1/z) - p(1/z) q(z) = 0$$

Its roots on the unit circle, refined by the secant method, give every curvature at
which stability may change. The limit is the first of these curvatures beyond which a
root lies outside the circle. No grid is searched, so no change can be missed.
"""

import itertools
from collections.abc import Callable

import numpy as np
import optax

from pipejax._core.checks import check_flag, check_tx, check_width
from pipejax._internal.numbers import number

from ._linear import linear_update
from ._loop import Loop, deviations, loop

Optimizer = Callable[[float], optax.GradientTransformation]


def spectral_radius(
    tx: optax.GradientTransformation,
    width: int,
    curvature: float,
    *,
    weight_prediction: bool = True,
    at_once: float | None = None,
) -> float:
    r"""Returns the factor by which a step multiplies the error on a quadratic.

    The factor is asymptotic: it is the largest absolute value of a root of the
    characteristic polynomial. Training converges if the factor is below 1, and diverges
    if it is above 1. `max_curvature` returns the curvature at which it reaches 1.

    The polynomial depends on where the train step takes its gradients. Below, `lambda`
    is `curvature`, K is `width` and u is the update of `tx`. Under a plain delay
    (`weight_prediction=False`), the error is the distance w to the optimum:

    $$w_t = w_{t-1} - u(g_{t-K}), g_t = \lambda w_t$$

    With weight prediction, two errors must both stay bounded, and the larger of their
    factors is returned. The first error is the distance w to the optimum. It follows
    the recursion of width 1, because on a quadratic the predictions of all devices are
    right on average. The second error is the deviation `e_i = g_i - g`: the gradient of
    device i minus the mean over devices. Device i takes its gradient at its prediction,
    the parameters after its own K-1 gradients in flight have been applied. Therefore

    $$e_{i,t} = -\lambda (u(e_{i,t-K+1}) + ... + u(e_{i,t-1})) + n_{i,t}$$

    where `n_{i,t}` is the part of the deviation that comes from the batch. In the sum,
    u starts from an optimizer state of zero at every step t.

    If a part of every gradient is exchanged at once (`at_once` of `make_train_step`),
    nothing is predicted. In a direction of which the codec keeps the share `alpha`,

    $$w_t = w_{t-1} - u(\alpha g_{t-1} + (1 - \alpha) g_{t-K})$$

    Args:
      tx: An Optax transformation that is linear in its gradients, such as `optax.sgd`
        with or without momentum. A schedule counts with its final value.
      width: Pipeline width K, at least 1.
      curvature: Second derivative of the loss, a finite number of at least 0.
      weight_prediction: Same as in `pj.make_train_step`, for training on several
        devices. On a single device no gradient deviates from the mean, so with weight
        prediction the result for `width=1` holds at every width.
      at_once: The share alpha of the gradient that is exchanged at once, from 0 to 1.
        `weight_prediction` then has no effect. `None` if nothing is.

    Returns:
      The factor per step, a float of at least 0.

    Raises:
      ValueError: If `tx` is not linear, if `tx` has a schedule that ends at 0, or if
        another argument breaks its rule.

    Examples:
      >>> import optax, pipejax as pj
      >>> f"{pj.stability.spectral_radius(optax.sgd(0.1), 2, curvature=8.0):.3f}"
      '0.800'

    References:
      Giladi et al., At Stability's Edge, ICLR 2020,
      https://openreview.net/forum?id=Bkeb7lHtvH
    """
    if not 0 <= number(curvature) < np.inf:
        raise ValueError(
            f"`curvature` must be a finite number of at least 0, got {curvature!r}."
            " A direction of negative curvature has no optimum to converge to."
        )
    loops = _loops(tx, width, weight_prediction, at_once)
    return max(_radius(each, curvature) for each in loops)


def max_curvature(
    tx: optax.GradientTransformation,
    width: int,
    *,
    weight_prediction: bool = True,
    at_once: float | None = None,
) -> float:
    """Returns the curvature below which training is stable on every quadratic.

    On a quadratic loss with several parameters, training is stable if the largest
    eigenvalue of the Hessian is below this limit. `sharpness` measures that eigenvalue.
    `max_learning_rate` solves for the learning rate instead of the curvature.

    Args:
      tx: Same as in `spectral_radius`.
      width: Pipeline width K, at least 1.
      weight_prediction: Same as in `spectral_radius`.
      at_once: Same as in `spectral_radius`.

    Returns:
      The limit on the curvature, in units of loss per squared parameter. It is infinite
      if every curvature is stable, and 0 if none is.

    Raises:
      ValueError: In the same cases as `spectral_radius`.

    Examples:
      >>> import optax, pipejax as pj
      >>> tx = optax.sgd(0.1, momentum=0.9)
      >>> for width in (1, 2, 3):
      ...     print(f"{pj.stability.max_curvature(tx, width):.2f}")
      38.00
      10.00
      5.26

    References:
      Cohen et al., Gradient Descent on Neural Networks Typically Occurs at the Edge of
      Stability, 2021, https://arxiv.org/abs/2103.00065

      Giladi et al., At Stability's Edge, ICLR 2020,
      https://openreview.net/forum?id=Bkeb7lHtvH
    """
    loops = _loops(tx, width, weight_prediction, at_once)
    return min(map(_limit, loops))


def max_learning_rate(
    optimizer: Optimizer,
    width: int,
    *,
    curvature: float = 1.0,
    weight_prediction: bool = True,
    at_once: float | None = None,
) -> float:
    r"""Returns the learning rate below which training is stable at a given curvature.

    Some limits have a closed form. For momentum `mu` and curvature `lambda`:

    - K=1, SGD: `2 / lambda`; heavy-ball: `2 (1 + mu) / lambda`
    - K=2 with weight prediction, SGD and heavy-ball: `1 / lambda`
    - K=3 with weight prediction, SGD: `1 / lambda`; heavy-ball:
      `1 / ((1 + mu) lambda)`
    - K=2 under a plain delay, heavy-ball: `(1 - mu) / lambda`
    - K=2 with the share `alpha` at once, heavy-ball: `(1 - mu) / ((1 - alpha) lambda)`,
      or if that is less, and `alpha` above 1/2, `2 (1 + mu) / ((2 alpha - 1) lambda)`
    - any K under a plain delay, SGD:

    $$\eta = 2 \sin(\pi / (4 K - 2)) / \lambda$$

    Args:
      optimizer: A function from a learning rate to a linear Optax transformation whose
        updates are proportional to the learning rate.
      width: Pipeline width K, at least 1.
      curvature: The largest eigenvalue of the Hessian of the loss, above 0. In a neural
        network it grows during training until it meets the limit (Cohen et al., 2021).
        Measure it with `sharpness`, or keep 1 to compare two widths.
      weight_prediction: Same as in `spectral_radius`.
      at_once: Same as in `spectral_radius`.

    Returns:
      The limit, in the units of the argument of `optimizer`.

    Raises:
      ValueError: If `optimizer` is not linear, if its updates are not proportional to
        the learning rate, or if another argument breaks its rule.

    Examples:
      >>> import functools, optax, pipejax as pj
      >>> momentum = functools.partial(optax.sgd, momentum=0.9)
      >>> for width in (1, 2):
      ...     print(f"{pj.stability.max_learning_rate(momentum, width):.2f}")
      3.80
      1.00

    References:
      Cohen et al., Gradient Descent on Neural Networks Typically Occurs at the Edge of
      Stability, 2021, https://arxiv.org/abs/2103.00065

      Giladi et al., At Stability's Edge, ICLR 2020,
      https://openreview.net/forum?id=Bkeb7lHtvH
    """
    if not number(curvature) > 0:
        raise ValueError(
            f"`curvature` must be a number above 0, got {curvature!r}. Pass the largest"
            " eigenvalue of the Hessian of the loss, or 1 to compare widths."
        )
    limit, half = (
        max_curvature(
            optimizer(rate),
            width,
            weight_prediction=weight_prediction,
            at_once=at_once,
        )
        for rate in (1.0, 0.5)
    )
    if not np.isclose(half, 2 * limit, rtol=1e-6):
        raise ValueError(
            "`optimizer` must give updates proportional to its learning rate; got one"
            f" that is stable up to curvature {limit:.6g} at learning rate 1 and up to"
            f" {half:.6g} at 0.5. Call pj.stability.max_curvature on the transformation"
            " itself."
        )
    return limit / curvature


def _loops(
    tx: optax.GradientTransformation,
    width: int,
    weight_prediction: bool,
    at_once: float | None,
) -> list[Loop]:
    update, width = linear_update(check_tx(tx)), check_width(width)
    check_flag("weight_prediction", weight_prediction)
    if at_once is not None:
        if not 0 <= number(at_once) <= 1:
            raise ValueError(
                f"`at_once` must be a share from 0 to 1, or None, got {at_once!r}. It"
                " is the part of a gradient that is not delayed."
            )
        return [loop(update, width, at_once)]
    if not weight_prediction:
        return [loop(update, width)]
    spread = [deviations(update, width)] if width > 1 else []
    return [loop(update, 1), *spread]


def _limit(of: Loop) -> float:
    edges = [0.0, *_crossings(of)]
    # No root crosses the unit circle between two edges, so stability is the same on the
    # whole interval, and one point of it decides.
    between = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    beyond = 2 * edges[-1] + 1
    for low, point in zip(edges, [*between, beyond], strict=True):
        if _radius(of, point) > 1:
            return low
    return np.inf


def _crossings(of: Loop) -> list[float]:
    """Returns all positive curvatures that put a root on the unit circle, ascending."""
    from scipy.optimize import newton  # slow to import

    p, q = of.polynomials()

    def imaginary(angle: float) -> float:
        z = np.exp(1j * angle)
        return float(np.imag(np.polyval(p, z) * np.conj(np.polyval(q, z))))

    roots = np.roots(np.polysub(np.polymul(p, q[::-1]), np.polymul(p[::-1], q)))
    # `np.roots` finds roots that lie close together only to a few digits, so the
    # tolerance is wide and the angles are refined below. A root that is not on the
    # circle but passes the test does no harm: stability does not change at its edge.
    angles = np.abs(np.angle(roots[np.abs(np.abs(roots) - 1) < 1e-2]))
    inner = angles[(angles > 1e-6) & (angles < np.pi - 1e-6)]
    polished = [newton(imaginary, x, x1=x * (1 + 1e-4), disp=False) for x in inner]
    z = np.append(np.exp(1j * np.array(polished)), [-1, 1])
    numerator, denominator = np.polyval(p, z), np.polyval(q, z)
    meets = np.abs(denominator) > 1e-12 * np.abs(q).max()
    curvatures = np.sort(np.real(-numerator[meets] / denominator[meets]))
    # A root and its complex conjugate give the same edge, which is kept once. An edge
    # at curvature 0 is dropped: its root z = 1 only says that a parameter without a
    # loss stays where it is.
    distinct = np.diff(curvatures, prepend=0.0) > 1e-6 * np.abs(curvatures)
    least = 1e-9 * np.abs(p).max() / (np.abs(q).max() or 1)
    return [float(x) for x in curvatures[distinct & (curvatures > least)]]


def _radius(of: Loop, curvature: float) -> float:
    return float(np.abs(np.linalg.eigvals(of.matrix(curvature))).max())
