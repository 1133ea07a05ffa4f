"""Tests what hides an exchange, and how much this gains at most."""

import math

import pytest

from pipejax import timing
from pipejax.timing import Compute, Duration

COMPUTE = Compute(1.0, 2.0, 0.5)


def exchange(seconds, computed=0.0):
    return Duration(0.0, seconds - computed, 0.0, computed, 0.0)


def test_ceilings_are_2_and_four_thirds():
    """The ceilings are 2 over D-Sync, and 4/3 over D-Sync that overlaps."""
    compute = Compute.of(3.0)
    assert timing.ceilings(compute, exchange(3.0))["synchronous"] == 2
    assert math.isclose(timing.ceilings(compute, exchange(3.0))["overlapped"], 4 / 3)
    for seconds in (0.1, 1.0, 2.0, 2.9, 3.1, 4.0, 30.0):
        found = timing.ceilings(compute, exchange(seconds))
        assert 1 <= found["overlapped"] <= 4 / 3
        assert found["overlapped"] <= found["synchronous"] < 2


def test_ceilings_need_a_time():
    with pytest.raises(
        ValueError, match=r"^`compute` or `exchange` must take time, go"
    ):
        timing.ceilings(Compute.of(0), exchange(0.0))


def test_mean_inside_hosts_is_a_part_of_the_pipelined_step_alone():
    comm, own = exchange(3.0), COMPUTE.averaging(0.25)
    found = timing.ceilings(own, comm)
    assert found["synchronous"] == 6.5 / 3.75
    assert found["overlapped"] == 4.5 / 3.75
    # 2 passes and 2 updates take 4 s, and the mean a quarter.
    longer = exchange(6.25)
    assert timing.batch_to_hide(own, longer) == pytest.approx((6.25 - 1.25) / 3)


@pytest.mark.parametrize("seconds", [0.5, 3.0, 30.0])
def test_ceilings_and_batch_size_follow_the_sharded_step(seconds):
    """Half of the exchange hides behind each pass: 1 s forward, 2 s backward."""
    comm, half = exchange(seconds), seconds / 2
    step = timing.sharded_step_time(COMPUTE, comm)
    assert step == max(1.0, half) + max(2.0, half) + 2 * 0.5
    assert timing.ceilings(COMPUTE, comm, shard_optimizer=True) == {
        "synchronous": (3.5 + seconds) / step,
        "overlapped": (1.5 + max(2.0, seconds)) / step,
    }
    times = timing.batch_to_hide(COMPUTE, comm, shard_optimizer=True)
    assert times == half / 1.0
    larger = Compute(times * 1.0, times * 2.0, 0.5)
    assert timing.sharded_step_time(larger, comm) == larger.total + larger.update
    on_cpu = timing.batch_to_hide(COMPUTE, comm, one_core=True, shard_optimizer=True)
    assert on_cpu == timing.batch_to_hide(COMPUTE, comm, one_core=True)


@pytest.mark.parametrize("weight_prediction", [True, False])
@pytest.mark.parametrize("one_core", [True, False])
@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("seconds", [1.0, 4.0, 30.0])
def test_batch_size_found_by_batch_to_hide_just_hides_the_exchange(
    seconds, width, one_core, weight_prediction
):
    """Below this batch size a step takes the exchange's time, above it more."""
    comm = exchange(seconds, computed=0.25)

    def step(times):
        compute = Compute(times * 1.0, times * 2.0, 0.5)
        return timing.pipelined_step_time(
            compute,
            comm,
            width,
            one_core=one_core,
            weight_prediction=weight_prediction,
        )

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if step(middle) <= seconds else (low, middle)
    found = timing.batch_to_hide(
        COMPUTE, comm, width, one_core=one_core, weight_prediction=weight_prediction
    )
    assert math.isclose(found, low, abs_tol=1e-9)


def test_batch_to_hide_may_be_zero_or_infinite():
    assert timing.batch_to_hide(COMPUTE, exchange(0.1)) == 0
    assert timing.batch_to_hide(Compute(0.0, 0.0), exchange(1.0)) == math.inf
    with pytest.raises(ValueError, match="`width` must be a whole number of at least"):
        timing.batch_to_hide(COMPUTE, exchange(1.0), 1)
