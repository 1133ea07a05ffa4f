"""Measures how fast codecs are, compared with a copy of the same array."""

import statistics
from typing import Any

import numpy as np

from experiments import codec_speed, report

from ._arrays import is_small

CALLS = 10  # before the program waits, so that launching costs no time


def measured() -> dict[str, Any]:
    """Returns the GB/s that each codec reads and writes, and their share of a copy."""
    mebibytes, rounds = (1, 3) if is_small() else (256, 9)
    rng = np.random.default_rng(0)
    runs, moved = codec_speed.programs(mebibytes, rng, CALLS)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in rng.permutation(list(runs)):
            times[name].append(runs[name]())
    speeds = {
        name: moved[name] / statistics.median(values) / 1e9
        for name, values in times.items()
    }
    return {
        name: {
            "gigabytes_per_second": speed,
            "of_the_copy": speed / speeds["copy"],
            "quartiles_ms": [1e3 * q for q in report.quartiles(times[name])],
        }
        for name, speed in speeds.items()
    }
