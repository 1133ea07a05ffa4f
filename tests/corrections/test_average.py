"""Tests the mean of the last gradients by hand on a sequence of numbers."""

import pytest

from pipejax import corrections

from .helpers import outputs


def test_average_is_over_what_there_is():
    tx = corrections.average_gradients(3)
    assert outputs(tx, [3, 6, 9, 12, 0]) == [3, 4.5, 6, 9, 7]


def test_average_of_one_is_the_gradient():
    assert outputs(corrections.average_gradients(1), [3, 6]) == [3, 6]


def test_a_count_is_at_least_one():
    with pytest.raises(ValueError, match="`count` must be an integer"):
        corrections.average_gradients(0)
