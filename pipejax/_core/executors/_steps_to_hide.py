"""Finds the round that hides an exchange of all parameters, by timing its parts."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from pipejax._internal.round_schedule import RoundSchedule, steps_that_hide, whole_steps
from pipejax._internal.types import Tree

MARGIN = 1.25
"""The factor by which the steps take longer than what they hide. Times vary."""
PARTS = 64
"""The number of chunks of the exchange of which one is timed."""
WAITS = 4
"""The length of rounds whose exchange nothing hides, in exchanges."""
ROUNDS = 5


class Timed(NamedTuple):
    """Seconds, as medians of several runs.

    Attributes:
      step: Of a step without communication.
      exchange: Of an exchange of all parameters, with nothing beside it.
      part: Of the exchange of one of `PARTS` chunks.
    """

    step: float
    exchange: float
    part: float


def schedule_to_hide(timed: Timed) -> RoundSchedule:
    r"""Returns the shortest round whose steps hide its exchange.

    Let c be the seconds of a step, x those of an exchange in one chunk, and l the part
    of x that every chunk takes, whatever its size. Rounds of n steps hide an exchange
    in n chunks, with a margin, if

    $$1.25 (x + (n - 1) l) \le n c$$

    If no such n steps take at most `WAITS x` seconds, rounds take this long, and all
    groups wait for their exchange.
    """
    c, x = timed.step, timed.exchange
    # A chunk takes l and its share of the rest.
    fixed = (PARTS * timed.part - x) / (PARTS - 1)
    fixed = min(max(fixed, 0.0), timed.part)
    waits = RoundSchedule(whole_steps(WAITS * x / c), 0)
    steps = steps_that_hide(c, MARGIN * x, MARGIN * fixed)
    if steps is None or steps > waits.sync_every:
        return waits
    return RoundSchedule(steps, steps)


def agreed(schedule: RoundSchedule) -> RoundSchedule:
    """Returns what the first process has found, on all of them."""
    own = np.array([schedule.sync_every, schedule.overlap_steps], np.int32)
    first = np.reshape(multihost_utils.process_allgather(own), (-1, 2))[0]
    return RoundSchedule(*map(int, first))


def medians(*runs: Callable[[], Tree]) -> list[float]:
    """Returns the median seconds of functions that are run in turn."""
    for run in runs:
        jax.block_until_ready(run())  # compiles the programs
    seconds = [[_seconds(run) for run in runs] for _ in range(ROUNDS)]
    return [float(median) for median in np.median(seconds, axis=0)]


def _seconds(run: Callable[[], Tree]) -> float:
    # No process may begin while another one has not finished the run before.
    multihost_utils.sync_global_devices("pipejax.steps_to_hide")
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start
