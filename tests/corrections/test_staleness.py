"""Tests updates that are divided by the width."""

import pytest

from pipejax import corrections

from .helpers import outputs


def test_staleness_divides_by_the_width():
    assert outputs(corrections.scale_by_staleness(4), [8, -4]) == [2, -1]


def test_a_width_is_at_least_one():
    with pytest.raises(ValueError, match="`width` must be an integer"):
        corrections.scale_by_staleness(0)
