"""Tests which numbers and which arrays are accepted as real and as inexact."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._internal.numbers import check_inexact, number


@pytest.mark.parametrize(
    "value", [2, 2.0, np.float32(2), np.int64(2), np.array(2.0), jnp.bfloat16(2)]
)
def test_numbers_become_floats(value):
    assert type(number(value)) is float
    assert number(value) == 2


@pytest.mark.parametrize(
    "value", [True, np.True_, np.array(True), "2", None, 10**400, [2], np.ones(1), 2j]
)
def test_other_values_are_no_numbers(value):
    assert math.isnan(number(value))


@pytest.mark.parametrize(
    "leaf",
    [jnp.int8(1), np.True_, 3, np.zeros(2, jax.dtypes.float0), jax.random.key(0)],
)
def test_leaf_without_a_gradient_is_named(leaf):
    with pytest.raises(ValueError, match=r"`params` must be floating .*`params\['n'\]"):
        check_inexact("params", {"n": leaf})


def test_floating_and_complex_leaves_are_inexact():
    check_inexact("params", (1.0, np.float16(1), jnp.complex64(1), None))
