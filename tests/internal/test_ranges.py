"""Tests the room that sums of a narrow dtype are given."""

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._internal.ranges import (
    headroom,
    is_narrow,
    scaled_down,
    scaled_up,
    sum_dtype,
)

from ..helpers import assert_bits_equal


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_sums_of_narrow_dtypes_are_float32(dtype):
    assert is_narrow(dtype)
    assert sum_dtype(dtype) == "float32"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "int8", "bool"])
def test_other_dtypes_are_left_alone(dtype):
    assert not is_narrow(dtype)
    assert sum_dtype(dtype) == dtype
    if dtype != "float64":
        x = jnp.zeros(2, dtype)
        assert scaled_down(x, 4) is x
        assert scaled_up(x, 4) is x


def test_headroom_is_the_next_power_of_two():
    assert [headroom(p) for p in (1, 2, 3, 4, 5, 1000)] == [1, 2, 4, 4, 8, 1024]


def test_scaling_is_exact_except_below_the_normal_range():
    """With eight devices, small numbers become multiples of 8 times 2^-24."""
    x = jnp.float16([65504, -1 / 3, 2.0**-11, 2.0**-21, 1.25 * 2.0**-22, 2.0**-23])
    back = scaled_up(scaled_down(x, 8), 8)
    wanted = np.asarray(x, np.float32)
    wanted[-2:] = 2.0**-21, 0
    assert_bits_equal(back, wanted)


def test_scaling_keeps_nan_and_infinity():
    x = jnp.float16([np.inf, -np.inf, np.nan])
    back = np.asarray(scaled_up(scaled_down(x, 8), 8))
    np.testing.assert_array_equal(back, [np.inf, -np.inf, np.nan])
