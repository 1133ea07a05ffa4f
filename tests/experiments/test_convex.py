"""Tests the theory of delayed gradients: bounds hold, and regret grows as predicted."""

import numpy as np
import optax
import pytest

from experiments.convex import __main__ as convex
from experiments.convex import _codecs, _random, _real, _regret, _run, _smooth
from pipejax import problems

TIMES = 2 ** np.arange(8, 13)
# These games distinguish the values of K; two delayed widths show the slope.
FEW = ("adversary, lines", "adversary, parabolas", "absolute loss", "ridge")


@pytest.fixture(
    scope="module",
    params=["few", pytest.param("all", marks=pytest.mark.full)],
)
def regrets(request):
    """The quick run measures some games, at the smallest and the largest widths."""
    names, widths = FEW, (1, 2, 8)
    if request.param == "all":
        names, widths = tuple(_regret.games()), (1, 2, 4, 8)
    return {
        name: _regret.measured(game, widths, TIMES, seeds=(0, 1))
        for name, game in _regret.games().items()
        if name in names
    }


@pytest.mark.full
def test_regret_stays_below_its_bound(regrets):
    for game in regrets.values():
        assert all(row["worst of the bound"] < 1 for row in game["widths"].values())


def test_regret_against_coin_tosses_is_close_to_the_minimum(regrets):
    """
    Regret is `sqrt(2 K T / pi)`, because coins are revealed to the learner too late.

    The mean is over 128 games. Each is a half-normal variable plus the learner's own
    guesses, which are a normal variable that is not larger. The deviation is
    `sqrt(pi/2 - 1 + pi/2) / sqrt(128)` = 0.13 of the mean, and 4 of them are allowed.
    """
    for width, row in regrets["adversary, lines"]["widths"].items():
        least = np.sqrt(2 * int(width) * TIMES / np.pi)
        np.testing.assert_allclose(row["regret"], least, rtol=0.52)


def test_regret_against_an_adversary_grows_like_the_root_of_k_t(regrets):
    """`R ~ sqrt(K T)`; an error of 0.13 over a factor of 4 changes the slope by 0.1."""
    game = regrets["adversary, lines"]
    slopes = [row["slope in T"] for row in game["widths"].values()]
    np.testing.assert_allclose([*slopes, game["slope in K"]], 0.5, atol=0.2)


def test_strongly_convex_regret_grows_like_a_logarithm(regrets):
    """`R = K/2 log(T/K)` plus the cost of the first block, so octaves are compared."""
    for width, row in regrets["adversary, parabolas"]["widths"].items():
        octaves = np.diff(row["regret"]) / (int(width) / 2 * np.log(2))
        assert octaves.mean() == pytest.approx(1.0, abs=0.3)


def test_regret_on_random_losses_grows_slowly_with_the_delay(regrets):
    assert regrets["absolute loss"]["slope in K"] < 0.4
    assert regrets["ridge"]["slope in K"] < 0.8


def test_delay_of_smooth_losses_costs_little_in_the_end():
    rows = _smooth.excess_of_averages(convex.some_logistic(), (1, 8), TIMES, (0, 1))
    behind = np.array(rows["8"]) / np.array(rows["1"])
    assert behind[0] > behind[-1]
    assert behind[-1] < 1.05


def test_single_asynchronous_worker_is_synchronous():
    problem, tx = convex.some_logistic(), optax.sgd(0.1)
    batches = _run.epochs(problem, 20, 4, seed=0)
    path = _run.path(problem, tx, 1, batches)
    alone = _random.asynchronous(problem, tx, 1, batches, seed=0)
    np.testing.assert_allclose(alone, path, rtol=1e-5, atol=1e-7)


def test_asynchronous_workers_use_the_parameters_last_received():
    """Compares the path on a quadratic without noise with a loop by hand."""
    problem = problems.quadratic([1.0, 2.0], noise=0.0)
    batches = problem.batch(np.zeros((12, 1), int))
    path = _random.asynchronous(problem, optax.sgd(0.1), 3, batches, seed=5)
    curvature = np.asarray(
        [problem.value(problem.optimum + e) - problem.minimum for e in np.eye(2)]
    )
    assert curvature.sum() == pytest.approx(1.5)  # half of the trace
    order = np.random.default_rng(5).integers(3, size=12)
    w, held, expected = np.zeros(2), np.zeros((3, 2)), []
    gradient = _gradient(problem)
    for who in order:
        expected.append(w)
        w = w - 0.1 * gradient(held[who])
        held[who] = w
    np.testing.assert_allclose(path, expected, rtol=1e-4, atol=1e-6)


def _gradient(problem):
    """Returns the gradient of a quadratic, from its values at a distance."""

    def gradient(w):
        return np.array(
            [(problem.value(w + e) - problem.value(w - e)) / 2 for e in np.eye(2)]
        )

    return gradient


@pytest.mark.full
@pytest.mark.parametrize(
    ("widths", "names"),
    [
        ((2,), ("int8", "top 10 %", "top 10 %, fed back")),
        pytest.param((1, 2), tuple(_codecs.CODECS), marks=pytest.mark.full),
    ],
)
def test_int8_costs_nothing_and_dropping_without_feedback_does(
    monkeypatch, widths, names
):
    some = {name: _codecs.CODECS[name] for name in names}
    monkeypatch.setattr(_codecs, "CODECS", some)
    rows = _codecs.excess(convex.some_logistic(), widths, 0.2, 1024, (0,))
    for width in map(str, widths):
        exact = rows["uncompressed"][width]
        assert rows["int8"][width] == pytest.approx(exact, rel=0.1)
        assert rows["top 10 %"][width] > 1.5 * exact
        assert rows["top 10 %, fed back"][width] < rows["top 10 %"][width]


def test_pooled_images_are_block_means():
    images = np.arange(32.0).reshape(1, 4, 4, 2)
    np.testing.assert_array_equal(
        _real.pooled(images, 4)[0, 0, 0], images.mean((0, 1, 2))
    )
