"""Tests the mean over groups of what each has of its own."""

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._core.rounds import mean_of_groups


def test_floats_are_averaged_and_counters_taken_from_the_first():
    found = mean_of_groups(
        {
            "count": jnp.array([3, 5]),
            "flag": jnp.array([True, False]),
            "moment": jnp.array([[1.0, 2.0], [3.0, 6.0]]),
            "phase": jnp.array([1 + 1j, 3 - 3j]),
        }
    )
    assert found["count"] == 3
    assert found["flag"]
    assert found["moment"].tolist() == [2, 4]
    assert found["phase"] == 2 - 1j


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_equal_numbers_keep_their_bits(dtype):
    """The sum of three tenths, divided by three, may be another number."""
    x = jnp.full((3, 4), 0.1, dtype)
    found = mean_of_groups(x)
    assert found.dtype == dtype
    assert np.array_equal(found, x[0])


def test_mean_of_float16_does_not_overflow():
    big = jnp.finfo(jnp.float16).max
    assert mean_of_groups(jnp.array([big, big, big, 0], jnp.float16)) == big * 0.75


def test_nan_of_a_group_is_not_lost():
    assert jnp.isnan(mean_of_groups(jnp.array([jnp.nan, 1.0])))
