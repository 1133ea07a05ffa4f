"""Tests which rounds are found to hide an exchange."""

import time

import pytest

from pipejax import timing
from pipejax._core.executors._steps_to_hide import (
    PARTS,
    Timed,
    agreed,
    medians,
    schedule_to_hide,
)
from pipejax._internal.round_schedule import RoundSchedule


def timed(step, fixed, sent):
    """Returns the times of an exchange with a fixed part and one by bytes."""
    return Timed(step, fixed + sent, fixed + sent / PARTS)


@pytest.mark.parametrize(
    ("step", "fixed", "sent", "steps"),
    [
        (1.0, 0.0, 4.0, 5),
        (1.0, 0.0, 0.01, 1),
        (1.0, 0.4, 10.0, 25),  # 1.25 * 10 / (1 - 0.5)
        (0.1, 0.04, 10.0, 250),
    ],
)
def test_every_chunk_takes_the_fixed_part(step, fixed, sent, steps):
    found = schedule_to_hide(timed(step, fixed, sent))
    assert found == RoundSchedule(steps, steps)
    # With a margin, the closed form finds nothing that is exposed.
    exchange = timing.Duration(1.25 * fixed, 1.25 * sent, 0, 0, 0)
    assert timing.local_step_time(
        timing.Compute.of(step), exchange, steps, steps
    ) == pytest.approx(step)


@pytest.mark.parametrize(("fixed", "steps"), [(0.7, 40), (0.9, 40), (5.0, 57)])
def test_exchange_in_chunks_of_long_latency_is_waited_for(fixed, steps):
    """Otherwise every step would take as long as a chunk, or rounds be very long."""
    found = schedule_to_hide(timed(1.0, fixed, 9.1))
    assert found == RoundSchedule(steps, 0)


def test_quick_part_has_no_fixed_part():
    assert schedule_to_hide(Timed(1.0, 4.0, 0.01)) == RoundSchedule(5, 5)


def test_functions_are_run_in_turn(monkeypatch):
    clock, runs = [0.0], []

    def taking(seconds):
        def run():
            runs.append(seconds)
            clock[0] += seconds

        return run

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert medians(taking(1.0), taking(3.0)) == [1.0, 3.0]
    assert runs == [1.0, 3.0] * 6


def test_single_process_agrees_alone():
    assert agreed(RoundSchedule(7, 3)) == RoundSchedule(7, 3)
