"""Compares regret under a delay with the bounds of Langford, Smola and Zinkevich.

Regret is the total loss of a run by step T, beyond that of the best point of a convex
set: `R[T] = sum_t f_t(w_t) - min_w sum_t f_t(w)`. Let tau = K - 1 be the delay, let
`|w - v|^2 / 2` be at most `F^2` for all points w and v of the set, and let L be the
largest norm of a gradient.

- For convex losses and the learning rate `sigma / sqrt(t - tau)`, where
  `sigma^2 = F^2 / (2 tau L^2)`, the bound is `R <= 4 F L sqrt(tau T)`. Without a delay,
  `sigma = F / L` and the bound is `R <= 2 F L sqrt(T)`.
- For losses of strong convexity lambda and the learning rate `1 / (lambda (t - tau))`,
  the bound is `R <= lambda tau F^2 + (1/2 + tau) L^2 / lambda (1 + tau + log T)`.

The bounds hold for every sequence of losses, so that only the losses of an adversary
come near them. The adversary tosses a coin s and repeats the loss K times. Whenever the
learner hears of a toss, the adversary tosses again. Against losses `f_t(w) = s w` in
blocks of K, no learner has less regret than `R = sqrt(2 K T / pi)` on average. Against
`f_t(w) = (w - s)^2 / 2`, no learner has less than about `R = K / 2 log(T / K)`. If
examples come in random order, a delay costs less.

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

COPIES = 64  # of a game in one dimension, all played at once


@dataclasses.dataclass(frozen=True)
class Game:
    """Losses that come one after the other, and a convex set for the parameters.

    Attributes:
      loss_fn: The loss of parameters and a batch of one example.
      start: The parameters at the start, [d].
      batches: A function of K, T and a seed that returns the batches, [T, 1, ...].
      project: Projects parameters into the set.
      diameter: The constant F.
      lipschitz: The constant L.
      strong_convexity: The constant lambda; 0 if the losses are not strongly convex.
      best: A function of the batches and `times` that returns the smallest sum of
        losses of any point of the set by each step of `times`.
      copies: The number of games that are played at once. Regret is that of one game.
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
        """Returns the learning rate of the theorem, where `count + 1` is `t - tau`."""
        if self.strong_convexity:
            return lambda count: 1 / (self.strong_convexity * (count + 1))
        sigma = self.diameter / (self.lipschitz * np.sqrt(2 * tau or 1))
        return lambda count: sigma / jnp.sqrt(count + 1)

    def bound(self, tau: int, times: np.ndarray) -> np.ndarray:
        """Returns the bound on the regret by each step of `times`."""
        f, l, c = self.diameter, self.lipschitz, self.strong_convexity  # noqa: E741
        if c:
            waited = 1 + tau + np.log(times)
            return c * tau * f**2 + (0.5 + tau) * l**2 / c * waited
        return 4 * f * l * np.sqrt(tau * times) if tau else 2 * f * l * np.sqrt(times)


def coins(steps: int, width: int, seed: int) -> np.ndarray:
    """Returns random -1 or 1 in blocks of `width` steps, [steps, 1, COPIES]."""
    rng = np.random.default_rng(seed)
    blocks = rng.choice([-1.0, 1.0], size=(-(-steps // width), COPIES))
    tossed = np.repeat(blocks, width, axis=0)[:steps, None]
    return tossed.astype(np.float32)


def adversary_of_lines() -> Game:
    """Makes the game of `f_t(w) = s w` on [-1, 1]."""

    def best(tossed: np.ndarray, times: np.ndarray) -> np.ndarray:
        sums = np.cumsum(tossed[:, 0], axis=0)[times - 1]
        return -np.abs(sums).sum(axis=1)

    return _on_an_interval(lambda w, s: jnp.sum(s[0] * w), 1.0, 0.0, best)


def adversary_of_parabolas() -> Game:
    """Makes the game of `f_t(w) = (w - s)^2 / 2` on [-1, 1]."""

    def best(tossed: np.ndarray, times: np.ndarray) -> np.ndarray:
        means = np.cumsum(tossed[:, 0], axis=0)[times - 1] / times[:, None]
        return 0.5 * times * (1 - means**2).sum(axis=1)  # because s^2 = 1

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
    """Makes the game of one example at a time, in random order.

    The set is the ball around 0 whose radius is twice the norm of the optimum w*.
    """
    radius = 2 * float(np.linalg.norm(problem.optimum))

    def batches(width: int, steps: int, seed: int) -> Any:
        del width
        return epochs(problem, steps, 1, seed)

    def best(_: Any, times: np.ndarray) -> np.ndarray:
        return times * problem.minimum  # exact after whole epochs

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
    """Returns all games by name.

    Parabolas, ridge and logistic with L2 are strongly convex.
    """
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
    """Returns the regret of one game by each step of `times`."""
    batches = game.batches(width, int(times[-1]), seed)
    tx = optax.chain(optax.sgd(game.rate(width - 1)), within(game.project))
    args = game.loss_fn, tx, width, game.start, batches
    losses = observed(*args, look=game.loss_fn).astype(np.float64)
    lost = np.cumsum(losses)[times - 1]
    return (lost - game.best(batches, times)) / game.copies


def measured(
    game: Game, widths: tuple[int, ...], times: np.ndarray, seeds: tuple[int, ...]
) -> dict[str, Any]:
    """Returns the mean regret over seeds, its bound, and its growth with T and K."""
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
