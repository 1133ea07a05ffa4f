"""Delay-robust momentum: the same speed along a valley, less gain where a delay hurts.

An optimizer with momentum is a filter of gradients: heavy-ball's update is
`h EMA_mu(g)`, `h = eta / (1 - mu)`. In a pipeline it closes a loop with an integrator
(the parameters) and K steps of delay, whose phase at an angular frequency of w radians
a step is `-pi / 2 - (K - 1/2) w`. A run diverges where that and the filter's own lag
come to -pi while the loop's gain is still above 1. Heavy-ball lags where the delay
does, and at K=2 its limit falls from `2 (1 + mu) / eta` to `(1 - mu) / eta`.

So move the lag down to where the delay is nothing yet:

  `u = k g + (h - k) EMA_beta(g)`

- `h` stays: it is the speed along directions of little curvature.
- `k = r h`, `r = sqrt((1 - mu) / (1 + mu))`: of gradients that are noise heavy-ball's
  updates have the variance `h^2 (1 - mu) / (1 + mu)` beside the gradients'. So have
  these, `k^2`, but for what the average adds. Their filter's greatest lag is
  `asin((1 - r) / (1 + r))`, 39 degrees at 0.9, where heavy-ball's is `asin(mu)`, 64.
- `1 - beta = r w / 8`, `w = pi / (2 K - 1)` the frequency at which the delay alone
  makes it -pi: from an eighth of it on the lag fades, and `k g` is all there is.

What is left there is SGD at the rate k, stable to a curvature of
`2 sin(pi / (4 K - 2)) sqrt(1 - mu^2) / eta`, of which the rest of the lag takes up to
an eighth: 0.39 / eta at K=2 and 0.9, where heavy-ball has 0.1 / eta, 3.8 / eta without
a delay. A smaller share is stable further, to nearly that of SGD,
`2 sin(pi / (4 K - 2)) (1 + mu) / eta` at `r = (1 - mu) / (1 + mu)`, and learns more
slowly: its average has to be as slow.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pipejax.train_step import check_width


class DelayRobustState(NamedTuple):
    """What `delay_robust` carries.

    Attributes:
      average: `EMA_beta` of what came in.
      before: what the new filter made of the step before.
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
    """Turns an optimizer's momentum into one that a delay of `width - 1` leaves stable.

    A filter that takes back `1 / (1 - mu / z)` and puts a slower average beside a share
    of the gradient as it is in its place:

      `d[t] = r g[t] + (1 - r) EMA_beta(g)[t]`
      `update(g[t]) = (d[t] - mu d[t-1]) / (1 - mu)`

    With r and beta from `momentum` and `width`, see below, the optimizer keeps its
    hyper-parameters: `optax.chain(delay_robust(0.9, 2), optax.sgd(0.1, 0.9))` is
    `u = h d`. At momentum 0 it does nothing.

    Before an optimizer it filters gradients, after it updates. To SGD it is the same;
    AdamW's second moment had better see gradients as they are, so put it after. It
    takes back heavy-ball's momentum, or that of Adam's first moment. Nesterov's it
    takes back in part, and Muon's, whose updates are made orthogonal after it.

    It differs from quasi-hyperbolic momentum, which has the same two terms for another
    purpose, in the rule for them, and from `extrapolate_updates`, which adds a
    difference of updates to an optimizer whose momentum stays as fast.

    Args:
      momentum: mu, the optimizer's: `momentum` of SGD, `b1` of Adam; in [0, 1).
      width: pipeline width K, at least 1; at 1 there is nothing to correct, and it does
        nothing.
      share: r, above 0 and at most 1; by default `sqrt((1 - mu) / (1 + mu))`, with
        which updates are as noisy as before. Less is stable at larger learning rates.
      decay: beta, in [0, 1); by default `1 - r pi / (2 K - 1) / 8`, an average whose
        lag is over where the delay's begins.

    Returns:
      A transformation, to be put before or after an optimizer. It keeps two arrays a
      parameter.

    Raises:
      ValueError: if an argument breaks its rule.

    Reference: Ma and Yarats, Quasi-hyperbolic momentum and Adam, 2019,
      https://arxiv.org/abs/1810.06801
    """
    width = check_width(width)
    if not 0 <= momentum < 1:
        raise ValueError(
            f"`momentum` must lie in [0, 1), got {momentum!r}: that of the optimizer,"
            " `momentum` of SGD or `b1` of Adam."
        )
    if share is None:
        share = math.sqrt((1 - momentum) / (1 + momentum))
    elif not 0 < share <= 1:
        raise ValueError(
            f"`share` must lie in (0, 1], got {share!r}: that of the gradient itself in"
            " an update, or None for one by `momentum`."
        )
    if decay is None:
        decay = 1 - share * math.pi / (2 * width - 1) / 8
    elif not 0 <= decay < 1:
        raise ValueError(
            f"`decay` must lie in [0, 1), got {decay!r}: that of the average, or None"
            " for one by `share` and `width`."
        )
    if width == 1 or momentum == 0:
        return optax.identity()

    def init_fn(params: optax.Params) -> DelayRobustState:
        # Arrays of their own, each: a loop that donates its state gives all away.
        return DelayRobustState(
            jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)
        )

    def update_fn(
        updates: optax.Updates,
        state: DelayRobustState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, DelayRobustState]:
        del params
        average = jax.tree.map(
            lambda m, g: decay * m + (1 - decay) * g, state.average, updates
        )
        mixed = jax.tree.map(lambda g, m: share * g + (1 - share) * m, updates, average)
        filtered = jax.tree.map(
            lambda d, before: (d - momentum * before) / (1 - momentum),
            mixed,
            state.before,
        )
        return filtered, DelayRobustState(average, mixed)

    return optax.GradientTransformation(init_fn, update_fn)
