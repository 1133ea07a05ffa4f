"""Tests that the documents show what a delay does where the answer is known."""

import functools

import optax
import pytest

import pipejax as pj
from experiments.convex import __main__ as convex
from experiments.corrections import average_gradients

from .results import assert_shown, lines, result

HEAVY_BALL = functools.partial(optax.sgd, momentum=0.9)


STABILITY = {
    "SGD": lambda width: optax.sgd,
    "heavy-ball, 0.5": lambda width: functools.partial(optax.sgd, momentum=0.5),
    "heavy-ball, 0.9": lambda width: HEAVY_BALL,
    "Nesterov, 0.9": lambda width: functools.partial(HEAVY_BALL, nesterov=True),
    "`extrapolate_updates`": lambda width: (
        lambda rate: optax.chain(
            HEAVY_BALL(rate), pj.corrections.extrapolate_updates(width - 1)
        )
    ),
    "average": lambda width: (
        lambda rate: optax.chain(average_gradients(width), HEAVY_BALL(rate))
    ),
    "`delay_robust`": lambda width: (
        lambda rate: optax.chain(
            HEAVY_BALL(rate), pj.corrections.delay_robust(0.9, width)
        )
    ),
}


def rows_of_stability():
    corrected = ("`extrapolate_updates`", "average", "`delay_robust`")
    predicted = [name for name in STABILITY if name not in corrected]
    cases = [
        *((name, name, {"weight_prediction": False}) for name in STABILITY),
        *((f"{name}, predicted", name, {}) for name in predicted),
        ("heavy-ball, 0.9, fed back", "heavy-ball, 0.9", {"deviation_feedback": 0.5}),
    ]
    for title, name, how in cases:
        limits = [
            pj.stability.max_learning_rate(STABILITY[name](width), width, **how)
            for width in (1, 2, 3, 4)
        ]
        yield f"| {title} | " + " | ".join(f"{x:.3g}" for x in limits) + " |"


def rows_of_convex():
    found = result("convex")
    for rows in (
        convex.regret_rows(found)[1:],
        convex.width_rows(found["codecs"], "codec")[1:],
    ):
        yield from lines(rows)


@pytest.mark.parametrize(
    ("path", "rows"),
    [
        ("docs/convergence.md", rows_of_stability),
        ("docs/convergence.md", rows_of_convex),
    ],
)
def test_figures_equal_the_result_files(path, rows):
    assert_shown(path, rows())


def test_cost_of_a_delay_is_gone_at_the_end_of_convex_runs():
    """The document says 3 % for smooth losses, and 2 % for softmax regression."""
    found = result("convex")
    bounds = [(found["smooth"], 0.03)]
    bounds += [(rows, 0.02) for rows in found["softmax"].values()]
    for rows, bound in bounds:
        assert all(abs(row[-1] / rows["1"][-1] - 1) < bound for row in rows.values())
