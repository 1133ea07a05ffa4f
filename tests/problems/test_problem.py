"""Tests a problem's arithmetic: its value in float64, and its batches in float32."""

import numpy as np
import pytest

from pipejax import problems

from .helpers import features, labels


def by_hand(examples):
    """Returns a problem with `f(w, x) = 1/2 (w - x)^2`, whose optimum is the mean."""
    return problems.Problem(
        loss_fn=lambda w, x: 0.5 * ((w - x) ** 2).mean(),
        examples=np.asarray(examples, np.float64),
        optimum=np.mean(examples),
        strong_convexity=1.0,
        smoothness=1.0,
        lipschitz=lambda radius: radius + np.ptp(examples),
    )


def test_value_minimum_and_excess_are_over_all_examples():
    """For 1, 2 and 6, `F(w) = 1/2 (w - 3)^2 + 7/3`, because their variance is 14/3."""
    problem = by_hand([1.0, 2.0, 6.0])
    assert problem.size == 3
    assert problem.minimum == pytest.approx(7 / 3, rel=1e-15)
    assert problem.value(5.0) == pytest.approx(2 + 7 / 3, rel=1e-15)
    assert problem.excess(5.0) == pytest.approx(2, rel=1e-15)


def test_excess_is_computed_in_float64():
    """In float32, 1e-6 from an optimum of 1 is off by 5 %, and `1/2 + 5e-13` is 1/2.

    In float64, the error of the sum is at most 2^-54, or 1e-4 of the added number.
    """
    excess = by_hand([0.0, 2.0]).excess(np.float64(1 + 1e-6))
    assert excess == pytest.approx(5e-13, rel=3e-4, abs=0)


def test_batch_holds_the_requested_examples():
    x, y = problems.softmax(features(), labels(), l2=0.01).batch(np.array([3, 1]))
    np.testing.assert_allclose(x, features()[[3, 1]], rtol=1e-6)
    assert x.dtype == np.float32
    np.testing.assert_array_equal(y, labels()[[3, 1]])
