"""Tests quadratics: their spectrum, the size of their noise, and bad input."""

import jax
import numpy as np
import pytest

from pipejax import problems

from .helpers import in_float64

SPECTRUM = [0.5, 1.0, 4.0]


def test_hessian_has_the_given_spectrum_in_a_rotated_basis():
    problem = problems.quadratic(SPECTRUM)
    hessian = in_float64(
        jax.hessian(problem.loss_fn), problem.optimum, problem.examples
    )
    np.testing.assert_allclose(np.linalg.eigvalsh(hessian), SPECTRUM, rtol=1e-12)
    assert np.abs(hessian - np.diag(np.diag(hessian))).max() > 0.1
    # 1/2 v' A v is 1/2 2^2 lambda for v of length 2 along an eigenvector.
    values, vectors = np.linalg.eigh(hessian)
    for value, vector in zip(values, vectors.T, strict=True):
        assert problem.excess(problem.optimum + 2 * vector) == pytest.approx(2 * value)


def test_gradient_noise_is_the_same_at_every_point():
    problem = problems.quadratic(SPECTRUM, noise=0.3)
    gradient = jax.grad(problem.loss_fn)
    for away in (0.0, 5.0):
        w = problem.optimum + away
        all_of_them = in_float64(gradient, w, problem.examples)
        one = in_float64(gradient, w, problem.examples[:1])
        np.testing.assert_allclose(all_of_them - one, problem.examples[0], atol=1e-12)


def test_gradient_noise_has_mean_0_and_the_given_deviation():
    x = problems.quadratic(SPECTRUM, noise=0.3, size=10_000).examples
    assert x.shape == (10_000, 3)
    np.testing.assert_allclose(x.mean(axis=0), 0, atol=1e-14)
    # An estimate from n = 30,000 numbers is off by 1 / sqrt(2 n) or 0.4 %.
    assert x.std() == pytest.approx(0.3, rel=5 / np.sqrt(2 * x.size))
    assert not problems.quadratic(SPECTRUM).examples.any()


def test_seed_chooses_the_problem():
    first, again, other = (
        problems.quadratic(SPECTRUM, noise=1.0, seed=seed) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first.optimum, again.optimum)
    np.testing.assert_array_equal(first.examples, again.examples)
    assert (first.optimum != other.optimum).all()
    assert (first.examples != other.examples).all()


@pytest.mark.parametrize(
    ("spectrum", "options", "message"),
    [
        ([], {}, "`spectrum` must be a vector of finite"),
        ([-1.0], {}, "`spectrum` must be a vector"),
        ([np.inf], {}, "`spectrum` must be a vector"),
        ([1.0], {"noise": -1.0}, "`noise` must be a finite"),
        ([1.0], {"noise": np.inf}, "`noise` must be a finite"),
        ([1.0], {"size": 1}, "`size` must be an integer"),
        ([1.0], {"size": 2.5}, "`size` must be an integer"),
    ],
)
def test_bad_input_is_refused(spectrum, options, message):
    with pytest.raises(ValueError, match=message):
        problems.quadratic(spectrum, **options)
