"""Tests how often snapshots are made."""

import math

import pytest

from pipejax.checkpoint._snapshots._pace import steps_between


@pytest.mark.parametrize(
    ("stops", "beside", "faults", "seconds"),
    [
        (0.1, 0.0, 1e9, 10.0),  # 1 % of the time
        (0.0, 1.0, 1e9, 20.0),  # 5 % of the time
        (0.1, 0.0, 1 / 24, math.sqrt(2 * 0.1 * 86400)),  # Young's optimum
    ],
)
def test_longest_of_three_times_decides(stops, beside, faults, seconds):
    steps = steps_between(stops, beside, 0.25, faults)
    assert steps == math.ceil(seconds / 0.25)


def test_snapshot_without_cost_is_made_at_every_step():
    assert steps_between(0.0, 0.0, 0.25, 1.0) == 1
    assert steps_between(0.0, 0.0, 0.0, 1.0) == 1
