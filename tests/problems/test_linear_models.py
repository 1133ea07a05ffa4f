"""Tests linear models: known optima, and the input that they refuse."""

import functools

import numpy as np
import pytest
from scipy import optimize

from pipejax import problems

from .helpers import N, features, labels, signs, targets


def test_optimum_of_least_squares_equals_lapack():
    expected = np.linalg.lstsq(features(), targets(), rcond=None)[0]
    np.testing.assert_allclose(
        problems.least_squares(features(), targets()).optimum, expected, rtol=1e-10
    )


def test_optimum_of_the_absolute_loss_of_a_constant_is_the_median():
    y = np.array([3.0, -1.0, 10.0, 2.0, 2.5])
    assert problems.absolute(np.ones((5, 1)), y).optimum[0] == pytest.approx(2.5)


def test_unsigned_targets_equal_float_targets():
    y = np.abs(40 * targets()).astype(np.uint8)
    found, expected = (
        problems.absolute(features(), kind) for kind in (y, y.astype(float))
    )
    np.testing.assert_array_equal(found.optimum, expected.optimum)


@pytest.mark.parametrize("scale", [1e6, 1e-10, np.array([1, 1e3, 1e-10, 1e-3])])
@pytest.mark.parametrize(
    "make",
    [problems.absolute, problems.hinge, problems.logistic],
    ids=lambda f: f.__name__,
)
def test_optimum_does_not_depend_on_the_scale_of_features(make, scale):
    scaled, expected = make(scale * features(), signs()), make(features(), signs())
    np.testing.assert_allclose(scale * scaled.optimum, expected.optimum, rtol=1e-9)
    assert scaled.minimum == pytest.approx(expected.minimum, rel=1e-12)


def test_optimum_of_softmax_does_not_depend_on_the_scale_of_features():
    scaled = problems.softmax(1e-10 * features(), labels(), l2=1e-21).optimum
    expected = problems.softmax(features(), labels(), l2=0.1).optimum
    np.testing.assert_allclose(1e-10 * scaled, expected, rtol=1e-9)


def test_optimum_of_the_absolute_loss_scales_with_targets():
    found = problems.absolute(features(), 1e-10 * targets()).optimum
    expected = 1e-10 * problems.absolute(features(), targets()).optimum
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_tiny_separable_features_are_refused():
    with pytest.raises(ValueError, match="where a plane separates"):
        problems.logistic(1e-12 * features(), np.sign(features()[:, 0]))


def test_linear_program_without_an_answer_is_refused(monkeypatch):
    unfinished = functools.partial(optimize.linprog, options={"maxiter": 0})
    monkeypatch.setattr(optimize, "linprog", unfinished)
    with pytest.raises(ValueError, match=r"solver finds; got the answer:.*Scale the"):
        problems.absolute(features(), targets())


def test_optimum_of_logistic_regression_on_a_constant_is_the_log_odds():
    y = np.array([1] * 3 + [-1])
    problem = problems.logistic(np.ones((4, 1)), y)
    assert problem.optimum[0] == pytest.approx(np.log(3), rel=1e-10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: problems.absolute(features(), targets()[1:]), r"shape \[n, d\]"),
        (lambda: problems.absolute(features() * np.nan, targets()), "must be finite"),
        (
            lambda: problems.least_squares(np.ones((N, 2)), targets()),
            "must have independent features",
        ),
        (
            lambda: problems.least_squares(features(), targets(), l2=-1.0),
            "`l2` must be a finite number of at least 0",
        ),
        (lambda: problems.hinge(features(), labels()), "labels -1 and 1"),
        (
            lambda: problems.logistic(features(), np.sign(features()[:, 0])),
            "`l2` must be above 0 where a plane separates",
        ),
        (
            lambda: problems.logistic(features() @ (1 + 1e-6 * np.eye(4)), signs()),
            "must have an optimum that Newton's method finds.* nearly depend on others",
        ),
        (
            lambda: problems.least_squares(features(), targets(), l2=np.inf),
            "`l2` must be a finite number",
        ),
        (
            lambda: problems.softmax(features(), labels(), l2="a"),
            "`l2` must be a finite number of at least 0, got 'a'",
        ),
        (lambda: problems.softmax(features(), labels(), l2=0), "`l2` must be above 0"),
        (
            lambda: problems.softmax(features(), targets(), l2=0.1),
            "`y` must be integer labels from 0",
        ),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
