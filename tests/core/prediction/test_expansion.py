"""Tests that slopes of an expansion are finite and bounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._core.prediction._expansion import bounds_of, expansion, finite
from pipejax._internal.finite import sum_of_squares, sum_of_squares_on_one_device

M = {"w": jnp.float32([3.0, 4.0]), "b": jnp.zeros(2)}


def cubed(*gradients):
    return jax.tree.map(lambda *g: sum(x**3 for x in g), *gradients)


@pytest.mark.parametrize("squares", [sum_of_squares, sum_of_squares_on_one_device])
@pytest.mark.parametrize("count", [1, 2])
def test_bound_is_ten_times_the_length_of_the_change_over_the_mean(count, squares):
    found = jax.jit(lambda m: bounds_of(cubed, m, count, squares))(M)
    wanted = 10 * count * np.hypot(27, 64) / 5
    np.testing.assert_allclose(found["w"], wanted, rtol=1e-6)
    assert found["b"] == 0  # the mean is 0


def test_slopes_are_within_bounds_and_zero_if_not_finite():
    bounds = {"w": jnp.float32(30.0), "b": jnp.float32(0.0)}
    means = [M, M | {"w": jnp.float32([jnp.inf, 1.0])}]
    found = expansion(cubed, means, bounds)
    assert found.slopes[0]["w"].tolist() == [0, 30]
    assert found.slopes[1]["w"].tolist() == [0, 3]
    assert found.change["w"].tolist() == [0, 65]
    free = expansion(cubed, [M], None)
    assert free.slopes[0]["w"].tolist() == [27, 48]


def test_finite_puts_zeros_in_place_of_nan_and_infinity():
    found = finite({"w": jnp.float32([jnp.nan, -jnp.inf, 2.0])})
    assert found["w"].tolist() == [0, 0, 2]
