"""Tests step times in closed form."""

import pytest

from pipejax import timing
from pipejax.timing import Compute, Duration

COMPUTE = Compute(1.0, 2.0, 0.5)


def exchange(seconds, computed=0.0):
    return Duration(0.0, seconds - computed, 0.0, computed, 0.0)


@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.0, 3.5, 10.0])
def test_step_times_hide_the_exchange_according_to_width(seconds):
    comm = exchange(seconds)
    assert timing.synchronous_step_time(COMPUTE, comm) == 3.5 + seconds
    assert timing.overlapped_step_time(COMPUTE, comm) == 1.5 + max(2.0, seconds)
    assert timing.pipelined_step_time(COMPUTE, comm, 1) == 3.5 + seconds
    assert timing.pipelined_step_time(COMPUTE, comm, 2) == max(4.0, seconds)
    assert timing.pipelined_step_time(COMPUTE, comm, 5) == max(5.5, seconds)
    plain = timing.pipelined_step_time(COMPUTE, comm, 5, weight_prediction=False)
    assert plain == max(3.5, seconds)


@pytest.mark.parametrize("seconds", [0.001, 0.01, 0.03])
@pytest.mark.parametrize("buckets", [1, 2, 5, 32])
def test_buckets_start_when_made_and_when_the_link_is_free(buckets, seconds):
    """A bucket starts once it is made and the link is free."""
    compute, bucket = Compute(0.1, 0.2, 0.03), Duration(0, seconds, 0, 0, 0)
    free = 0.0
    for made in range(1, buckets + 1):
        ready = compute.forward + compute.backward * made / buckets
        free = max(free, ready) + seconds
    found = timing.synchronous_step_time(compute, bucket, buckets)
    assert found == pytest.approx(free + compute.update)
    if buckets == 1:
        assert found == pytest.approx(timing.synchronous_step_time(compute, bucket))
    whole = Duration(0, buckets * seconds, 0, 0, 0)
    assert found >= timing.overlapped_step_time(compute, whole)


@pytest.mark.parametrize("buckets", [0, 1.5, True])
def test_buckets_must_be_a_positive_whole_number(buckets):
    with pytest.raises(ValueError, match="`buckets` must be a whole number above 0"):
        timing.synchronous_step_time(Compute.of(0.1), Duration(0, 0, 0, 0, 0), buckets)


def test_codec_adds_to_compute_on_one_core():
    comm = exchange(3.0, computed=1.0)
    assert timing.pipelined_step_time(COMPUTE, comm) == 4.0
    assert timing.pipelined_step_time(COMPUTE, comm, one_core=True) == 5.0


@pytest.mark.parametrize("width", [0, -1, 1.5, True])
def test_width_must_be_a_positive_whole_number(width):
    with pytest.raises(ValueError, match="`width` must be a whole number above 0"):
        timing.pipelined_step_time(COMPUTE, exchange(1.0), width)


def test_bad_seconds_devices_and_flags_are_refused():
    with pytest.raises(ValueError, match="`seconds` must be at least 0 seconds"):
        Compute.of("x")
    with pytest.raises(ValueError, match="`devices` must be a whole number"):
        Compute.of(1.0).sharded(0)
    with pytest.raises(ValueError, match="`one_core` must be True or False, got 'no'"):
        timing.pipelined_step_time(COMPUTE, exchange(1.0), one_core="no")


def test_negative_seconds_are_refused():
    with pytest.raises(
        ValueError, match="`backward` must be at least 0 seconds and finite"
    ):
        Compute(1.0, -1.0)
