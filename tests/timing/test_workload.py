"""Tests the work of simulated steps."""

import dataclasses
import math

import numpy as np
import pytest

from pipejax.timing import Workload


def test_jitter_keeps_the_mean_compute_time():
    work = Workload(0.1, 1, jitter=0.5)
    times = work.compute_times(10_000, 4, np.random.default_rng(0))
    # 40,000 times have a standard deviation of 0.1 sqrt(exp(0.25) - 1) = 0.053.
    assert abs(times.mean() - 0.1) < 5 * 0.053 / 200


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seconds": -1}, "`seconds` must be at least 0 seconds and finite; got -1"),
        ({"seconds": math.nan}, "`seconds` must be at least 0 seconds and finite"),
        ({"elements": -3}, "`elements` must be a whole number of elements above 0"),
        ({"jitter": -1}, "`jitter` must be from 0 to 2, got -1"),
        ({"jitter": 1e3}, "`jitter` must be from 0 to 2, got 1000"),
        ({"slow": (1, 1, 1, -1)}, "`slow` must have finite factors of at least 0, got"),
        ({"slow": (1, math.inf)}, "`slow` must have finite factors of at least 0, got"),
    ],
)
def test_impossible_work_is_refused(change, says):
    with pytest.raises(ValueError, match=f"^{says}"):
        dataclasses.replace(Workload(0.2, 1000), **change)
