"""Tests which numbers are accepted, and that they become numbers of Python."""

import math

import numpy as np
import pytest

from pipejax.timing._checks import check_count, check_elements, number


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2)])
def test_numbers_become_floats(value):
    assert type(number(value)) is float
    assert number(value) == 2


@pytest.mark.parametrize("value", [True, "2", None, 10**400, [2]])
def test_other_values_are_no_numbers(value):
    assert math.isnan(number(value))


@pytest.mark.parametrize("check", [check_count, check_elements])
def test_whole_numbers_become_ints(check):
    assert type(check("hosts", np.int32(3))) is int
    for value in (0, 1.5, True, math.nan):
        with pytest.raises(ValueError, match=r"^`hosts` must be a whole number"):
            check("hosts", value)
