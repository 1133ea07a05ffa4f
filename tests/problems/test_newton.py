"""Tests Newton's method: known minima from near and far, and functions without one."""

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.problems._newton import TOLERANCE, minimise


def test_newton_solves_a_quadratic_like_lapack():
    rng = np.random.default_rng(0)
    factor, b = rng.normal(size=(5, 5)), rng.normal(size=5)
    matrix = factor @ factor.T + np.eye(5)

    def function(w):
        return 0.5 * w @ matrix @ w - b @ w

    found = minimise(function, np.zeros(5))
    assert found.dtype == np.float64
    # The error is at most the gradient's norm over the least curvature, which is above
    # 1.
    enough = TOLERANCE * max(1.0, np.linalg.norm(b))
    assert np.linalg.norm(found - np.linalg.solve(matrix, b)) <= enough


@pytest.mark.parametrize("start", [[[0.0, 1.0]], [[1.0, 0.0]], [[20.0, -20.0]]])
def test_full_steps_are_halved_if_divergent(start):
    """Newton's step for `log cosh` is `-sinh(2 w) / 2`, which diverges from 1.09 on."""
    center = np.array([[3.0, -1.0]])

    def function(w):
        return jnp.sum(jnp.log(jnp.cosh(w - center)) + 1e-3 * (w - center) ** 2)

    found = minimise(function, np.array(start))
    np.testing.assert_allclose(found, center, atol=2 * TOLERANCE)


def test_newton_stays_at_the_optimum():
    assert (
        minimise(lambda w: jnp.sum((w - 2) ** 2), np.full(3, 2.0)).tolist() == [2] * 3
    )


def test_function_without_a_minimum_is_refused():
    """A convex function whose slope is 2 far left, 4 far right, and 3 at the start."""
    with pytest.raises(ValueError, match="the gradient fell to 2, not to 3e-11"):
        minimise(lambda w: 3 * w[0] + jnp.log(jnp.cosh(w[0])), np.zeros(1))
