"""Tests which values count as integers: those of Python and of NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._internal.integers import is_integer


@pytest.mark.parametrize("value", [2, 10**30, np.int8(2), np.uint64(3), np.array(2)])
def test_integers_of_every_kind_count(value):
    assert is_integer(value, 2)
    assert not is_integer(value, 10**31)


def test_smallest_allowed_integer_counts():
    assert is_integer(0, 0)
    assert is_integer(-3, -3)
    assert not is_integer(-4, -3)


@pytest.mark.parametrize(
    "value", [True, 2.0, "2", None, np.float32(2), np.array([2]), jnp.float32(2), 2j]
)
def test_values_similar_to_integers_do_not_count(value):
    assert not is_integer(value, 0)
