"""Tests how often snapshots are made."""

import math

import pytest

from pipejax.checkpoint._snapshots._pace import steps_between


@pytest.mark.parametrize(
    ("stops", "beside", "faults", "seconds"),
    [
        (0.1, 0.0, 1e9, 10.0),  # 1 % of the time
        # Young's optimum
        (0.1, 0.0, 1 / 24, math.sqrt(2 * 0.1 * 86400)),
        (0.1, 2.0, 1 / 24, math.sqrt(2 * 0.5 * 86400)),
        # A slow link under many faults does not put off snapshots for long.
        (0.001, 15.0, 72, math.sqrt(2 * 3.001 * 50)),
    ],
)
def test_longer_of_two_times_decides(stops, beside, faults, seconds):
    steps = steps_between(stops, beside, 0.25, faults)
    assert steps == math.ceil(seconds / 0.25)


def test_snapshot_without_cost_is_made_at_every_step():
    assert steps_between(0.0, 0.0, 0.25, 1.0) == 1
    assert steps_between(0.0, 0.0, 0.0, 1.0) == 1
