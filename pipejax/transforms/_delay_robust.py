r"""Delay-robust momentum: the derivation of its rule.

An optimizer with momentum is a filter of gradients. With learning rate eta and momentum
mu, the update of heavy-ball is `h EMA_mu(g)` with the gain `h = eta / (1 - mu)`, where
`EMA` is an exponential moving average. In a pipeline of width K the filter is part of a
feedback loop with an integrator (the parameters) and K steps of delay. At an angular
frequency of w radians per step, the integrator and the delay have the phase

$$-\pi / 2 - (K - 1/2) w$$

The loop diverges if this phase plus the lag of the filter reaches -pi at a frequency
where the loop gain is still above 1. Heavy-ball lags at the same frequencies as the
delay. At K=2 its largest stable curvature therefore falls from `2 (1 + mu) / eta` to
`(1 - mu) / eta`.

`delay_robust` moves the lag of the filter down to frequencies where the delay is still
negligible. Its update is

$$u = k g + (h - k) EMA_{\beta}(g)$$

- The gain h is kept. It is the speed along directions of small curvature.
- The direct gain is `k = r h` with the share `r = sqrt((1 - mu) / (1 + mu))`. If the
  gradients are pure noise, the variance of a heavy-ball update is
  `h^2 (1 - mu) / (1 + mu)` times that of a gradient. The direct term `k g` has the same
  variance, and the average adds a little. The largest lag of the new filter is
  `asin((1 - r) / (1 + r))`, 39 degrees at mu = 0.9. The largest lag of heavy-ball is
  `asin(mu)`, 64 degrees at mu = 0.9.
- The decay is `1 - beta = r w / 8` with `w = pi / (2 K - 1)`, the frequency at which
  the integrator and the delay alone reach the phase -pi. The lag of the new filter
  fades above one eighth of this frequency, and only the term `k g` remains.

At the frequency w the optimizer is thus SGD with learning rate k, which is stable up to
the curvature

$$2 \sin(\pi / (4 K - 2)) \sqrt{1 - \mu^2} / \eta$$

The rest of the lag lowers this limit by up to one eighth. A smaller share r is stable
up to larger curvatures, and learns more slowly, because it needs an average that is
slower in the same proportion.
"""

import math
from typing import NamedTuple

import jax
import optax

from pipejax._core.checks import check_width
from pipejax._internal.numbers import check_inexact, number
from pipejax._internal.ravel import wide_zeros


class DelayRobustState(NamedTuple):
    """State of `delay_robust`.

    Attributes:
      average: The exponential moving average of the updates, like the parameters.
      before: The mix d of the previous step, like the parameters.
    """

    average: optax.Updates
    before: optax.Updates


def delay_robust(
    momentum: float,
    width: int,
    *,
    share: float | None = None,
    decay: float | None = None,
) -> optax.GradientTransformation:
    r"""Replaces an optimizer's momentum by one that stays stable under a delay.

    A plain delay of `width - 1` steps makes momentum unstable at learning rates that
    are safe in synchronous training. This transformation cancels the momentum filter of
    the optimizer, whose transfer function is `1 / (1 - mu / z)`. The new filter mixes a
    share r of the current gradient with a slower average of all gradients:

    $$d_t = r g_t + (1 - r) EMA_{\beta}(g)_t$$

    $$update(g_t) = (d_t - \mu d_{t-1}) / (1 - \mu)$$

    Here mu is `momentum`, r is `share`, beta is `decay`, and `d_0 = 0`. The
    hyper-parameters of the optimizer stay as they are: a chain with
    `optax.sgd(eta, mu)` applies the update `eta / (1 - mu) d_t`.

    Put the transformation before an optimizer to filter gradients, or after it to
    filter updates. For SGD both orders are equivalent. For AdamW put it after, so that
    the second moment sees the gradients themselves. The momentum of heavy-ball and of
    Adam is canceled. That of Nesterov and of Muon, which orthogonalizes its updates
    after the momentum, is canceled only in part.

    Quasi-hyperbolic momentum (Ma and Yarats, 2019) mixes the same two terms for another
    purpose, with another rule for share and decay.

    Args:
      momentum: Momentum mu of the optimizer, in [0, 1): `momentum` of SGD or `b1` of
        Adam. With 0 the transformation does nothing.
      width: Pipeline width K, at least 1. With 1 the transformation does nothing.
      share: Share r of the current gradient, in (0, 1]. A smaller share is stable at
        larger learning rates. `None` means `sqrt((1 - mu) / (1 + mu))`, with which
        updates are about as noisy as with the momentum that is replaced.
      decay: Decay rate beta of the average, in [0, 1). `None` means
        `1 - r pi / (2 K - 1) / 8`, with which the lag of the average ends at the
        frequencies where the lag of the delay begins.

    Returns:
      An `optax.GradientTransformation` whose state holds two arrays for each parameter.

    Raises:
      ValueError: If an argument breaks its rule. In `init` and `update`, also for
        integer leaves.

    Examples:
      >>> import optax, pipejax as pj
      >>> def heavy_ball(rate):
      ...     return optax.sgd(rate, momentum=0.9)
      >>> def robust(rate):
      ...     return optax.chain(pj.transforms.delay_robust(0.9, 2), heavy_ball(rate))
      >>> for optimizer in (heavy_ball, robust):
      ...     limit = pj.stability.max_learning_rate(
      ...         optimizer, width=2, weight_prediction=False
      ...     )
      ...     print(f"{limit:.2f}")
      0.10
      0.39

    References:
      Ma and Yarats, Quasi-hyperbolic momentum and Adam, 2019,
      https://arxiv.org/abs/1810.06801
    """
    width = check_width(width)
    if not 0 <= number(momentum) < 1:
        raise ValueError(
            f"`momentum` must lie in [0, 1), got {momentum!r}. Pass the momentum of"
            " the optimizer: `momentum` of SGD or `b1` of Adam."
        )
    if share is None:
        share = math.sqrt((1 - momentum) / (1 + momentum))
    elif not 0 < number(share) <= 1:
        raise ValueError(
            f"`share` must lie in (0, 1], got {share!r}. Pass None to derive it from"
            " `momentum`."
        )
    if decay is None:
        decay = 1 - share * math.pi / (2 * width - 1) / 8
    elif not 0 <= number(decay) < 1:
        raise ValueError(
            f"`decay` must lie in [0, 1), got {decay!r}. Pass None to derive it from"
            " `share` and `width`."
        )
    if width == 1 or momentum == 0:
        return optax.identity()

    def init_fn(params: optax.Params) -> DelayRobustState:
        check_inexact("params", params)
        # Each field has its own buffers. A loop that donates this state would otherwise
        # donate the same buffers twice.
        return DelayRobustState(wide_zeros(params), wide_zeros(params))

    def update_fn(
        updates: optax.Updates,
        state: DelayRobustState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, DelayRobustState]:
        del params
        check_inexact("updates", updates)
        # In 16 bits, a decay near 1 would be 1.
        wide = optax.tree.cast_like(updates, state.average)
        average = optax.tree.update_moment(wide, state.average, decay, 1)
        mixed = jax.tree.map(lambda g, m: share * g + (1 - share) * m, wide, average)
        filtered = jax.tree.map(
            lambda d, d0: (d - momentum * d0) / (1 - momentum), mixed, state.before
        )
        filtered = optax.tree.cast_like(filtered, updates)
        return filtered, DelayRobustState(average, mixed)

    return optax.GradientTransformation(init_fn, update_fn)
