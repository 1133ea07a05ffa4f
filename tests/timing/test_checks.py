"""Tests which whole numbers are accepted, and that they become ints of Python."""

import math

import numpy as np
import pytest

from pipejax.timing._checks import check_count, check_elements


@pytest.mark.parametrize("check", [check_count, check_elements])
def test_whole_numbers_become_ints(check):
    assert type(check("hosts", np.int32(3))) is int
    for value in (0, 1.5, True, math.nan):
        with pytest.raises(ValueError, match=r"^`hosts` must be a whole number"):
            check("hosts", value)
