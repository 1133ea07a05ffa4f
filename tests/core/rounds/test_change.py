"""Tests by how much numbers differ."""

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._core.rounds import change

from ...helpers import assert_bits_equal

INFINITE, NAN = np.inf, np.nan


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_change_is_the_difference(dtype):
    before = jnp.array([1.0, -2.5, 0.1, 7.0], dtype)
    after = jnp.array([3.0, -2.5, 0.3, 0.0], dtype)
    assert_bits_equal(change({"x": before}, {"x": after}), {"x": after - before})


def test_equal_infinities_and_nans_differ_by_nothing():
    before = jnp.array([INFINITE, -INFINITE, NAN, INFINITE, 1.0, NAN])
    after = jnp.array([INFINITE, -INFINITE, NAN, -INFINITE, INFINITE, 1.0])
    found = change(before, after)
    np.testing.assert_array_equal(found, [0, 0, 0, -INFINITE, INFINITE, NAN])
