"""Regret under a delay, against the bounds of Langford, Smola and Zinkevich.

Regret is what a run has lost by step T more than the best point of a convex set has,
`R[T] = sum_t f_t(w_t) - min_w sum_t f_t(w)`. With tau = K - 1, and `|w - v|^2 / 2` at
most `F^2` in the set, gradients at most L:

- convex: step `sigma / sqrt(t - tau)`, `sigma^2 = F^2 / (2 tau L^2)`:
  `R <= 4 F L sqrt(tau T)`; without a delay `sigma = F / L`, `R <= 2 F L sqrt(T)`
- of strong convexity lambda: step `1 / (lambda (t - tau))`:
  `R <= lambda tau F^2 + (1/2 + tau) L^2 / lambda (1 + tau + log T)`

A bound for whatever comes needs an adversary to be met: one that repeats itself K
times, and so has changed its mind whenever the learner hears of it. Against coin tosses
`f_t(w) = s w` in blocks of K nobody does better than `R = sqrt(2 K T / pi)`, against
`f_t(w) = (w - s)^2 / 2` than about `R = K / 2 log(T / K)`. Where examples come in an
order of chance a delay costs less.

Reference: Slow Learners are Fast, 2009, https://arxiv.org/abs/0911.0491
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from optax import projections

from pipejax import problems

from ._run import Loss, epochs, observed, slope, within

COPIES = 64  # of a game of one dimension, played at once


@dataclasses.dataclass(frozen=True)
class Game:
    """Losses that come one after another, and a set to stay in.

    Attributes:
      loss_fn: of parameters and a batch of one.
      start: parameters, [d].
      batches: from K, T and a seed to what comes, [T, 1, ...].
      project: into the set.
      diameter: F.
      lipschitz: L.
      strong_convexity: lambda, 0 if there is none.
      best: from what comes to the least sum of losses by each step of `times`.
      copies: games that are played at once; regret is of one.
    """

    loss_fn: Loss
    start: np.ndarray
    batches: Callable[[int, int, int], Any]
    project: Callable[[Any], Any]
    diameter: float
    lipschitz: float
    strong_convexity: float
    best: Callable[[Any, np.ndarray], np.ndarray]
    copies: int = 1

    def rate(self, tau: int) -> optax.Schedule:
        """The learning rate of the theorem; `count + 1` is `t - tau`."""
        if self.strong_convexity:
            return lambda count: 1 / (self.strong_convexity * (count + 1))
        sigma = self.diameter / (self.lipschitz * np.sqrt(2 * tau or 1))
        return lambda count: sigma / jnp.sqrt(count + 1)

    def bound(self, tau: int, times: np.ndarray) -> np.ndarray:
        """Of the regret by each of these steps."""
        f, l, c = self.diameter, self.lipschitz, self.strong_convexity  # noqa: E741
        if c:
            waited = 1 + tau + np.log(times)
            return c * tau * f**2 + (0.5 + tau) * l**2 / c * waited
        return 4 * f * l * np.sqrt(tau * times) if tau else 2 * f * l * np.sqrt(times)


def coins(steps: int, width: int, seed: int) -> np.ndarray:
    """-1 or 1 in blocks of K, [steps, 1, COPIES]."""
    rng = np.random.default_rng(seed)
    blocks = rng.choice([-1.0, 1.0], size=(-(-steps // width), COPIES))
    tossed = np.repeat(blocks, width, axis=0)[:steps, None]
    return tossed.astype(np.float32)


def adversary_of_lines() -> Game:
    """`f_t(w) = s w` on [-1, 1]."""

    def best(tossed: np.ndarray, times: np.ndarray) -> np.ndarray:
        sums = np.cumsum(tossed[:, 0], axis=0)[times - 1]
        return -np.abs(sums).sum(axis=1)

    return _on_an_interval(lambda w, s: jnp.sum(s[0] * w), 1.0, 0.0, best)


def adversary_of_parabolas() -> Game:
    """`f_t(w) = (w - s)^2 / 2` on [-1, 1]."""

    def best(tossed: np.ndarray, times: np.ndarray) -> np.ndarray:
        means = np.cumsum(tossed[:, 0], axis=0)[times - 1] / times[:, None]
        return 0.5 * times * (1 - means**2).sum(axis=1)  # squares of s are 1

    return _on_an_interval(lambda w, s: 0.5 * jnp.sum((w - s[0]) ** 2), 2.0, 1.0, best)


def _on_an_interval(
    loss_fn: Loss, lipschitz: float, strong_convexity: float, best: Any
) -> Game:
    return Game(
        loss_fn=loss_fn,
        start=np.zeros(COPIES),
        batches=lambda width, steps, seed: coins(steps, width, seed),
        project=lambda w: projections.projection_box(w, -1.0, 1.0),
        diameter=np.sqrt(2.0),
        lipschitz=lipschitz,
        strong_convexity=strong_convexity,
        best=best,
        copies=COPIES,
    )


def by_chance(problem: problems.Problem, strong_convexity: float = 0.0) -> Game:
    """Examples one at a time, in an order of chance, on a ball twice as far as w*."""
    radius = 2 * float(np.linalg.norm(problem.optimum))

    def batches(width: int, steps: int, seed: int) -> Any:
        del width
        return epochs(problem, steps, 1, seed)

    def best(_: Any, times: np.ndarray) -> np.ndarray:
        return times * problem.minimum  # of whole epochs

    return Game(
        loss_fn=problem.loss_fn,
        start=np.zeros(problem.optimum.shape),
        batches=batches,
        project=lambda w: projections.projection_l2_ball(w, radius),
        diameter=np.sqrt(2.0) * radius,
        lipschitz=problem.lipschitz(1.5 * radius),
        strong_convexity=strong_convexity,
        best=best,
    )


def games(size: int = 256, d: int = 8) -> dict[str, Game]:
    """All, by name: the strongly convex ones are those that say so."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, d)) / np.sqrt(d)
    y = x @ rng.normal(size=d) + 0.5 * rng.normal(size=size)
    signs = np.where(y > 0, 1, -1)
    l2 = 0.1
    return {
        "adversary, lines": adversary_of_lines(),
        "absolute loss": by_chance(problems.absolute(x, y)),
        "hinge": by_chance(problems.hinge(x, signs)),
        "logistic": by_chance(problems.logistic(x, signs)),
        "adversary, parabolas": adversary_of_parabolas(),
        "ridge": by_chance(problems.least_squares(x, y, l2=l2), l2),
        "logistic, L2": by_chance(problems.logistic(x, signs, l2=l2), l2),
    }


def regret(game: Game, width: int, times: np.ndarray, seed: int) -> np.ndarray:
    """Of one game, by each of `times`."""
    batches = game.batches(width, int(times[-1]), seed)
    tx = optax.chain(optax.sgd(game.rate(width - 1)), within(game.project))
    args = game.loss_fn, tx, width, game.start, batches
    losses = observed(*args, look=game.loss_fn).astype(np.float64)
    lost = np.cumsum(losses)[times - 1]
    return (lost - game.best(batches, times)) / game.copies


def measured(
    game: Game, widths: tuple[int, ...], times: np.ndarray, seeds: tuple[int, ...]
) -> dict[str, Any]:
    """Mean regret over seeds, its bound, and how it grows with T and with K."""
    rows, last = {}, {}
    for width in widths:
        each = np.array([regret(game, width, times, seed) for seed in seeds])
        mean = each.mean(axis=0)
        last[width] = float(mean[-1])
        rows[str(width)] = {
            "regret": mean.tolist(),
            "worst of the bound": float((each / game.bound(width - 1, times)).max()),
            "bound": game.bound(width - 1, times).tolist(),
            "slope in T": slope(times[len(times) // 2 :], mean[len(times) // 2 :]),
        }
    delayed = [width for width in widths if width > 1]
    return {
        "widths": rows,
        "slope in K": slope(delayed, [last[width] for width in delayed]),
    }
