"""Tests the simulator against the closed forms, and where they do not hold."""

import dataclasses
import math

import jax
import pytest

from pipejax import codecs, timing
from pipejax.timing import COST_MODELS, Cluster, CodecSpeed, Link, Shares, Workload

INT8 = codecs.int8()


def cluster(hosts, **changes):
    plain = Cluster(
        hosts,
        Link(1e-4, 62.5e6),
        reduction=4e9,
        synchronisation=1e-3,
        codecs={"int8": CodecSpeed(2e9, 3e9)},
    )
    return dataclasses.replace(plain, **changes)


def exchange_seconds(where, work):
    counts = timing.flat(where, work.algorithm, work.elements, work.codec)
    return timing.duration(where, counts, work.speed).total


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 7, 8, 64])
@pytest.mark.parametrize(
    ("algorithm", "codec"),
    [(a, c) for a in COST_MODELS for c in (None, "int8") if (a, c) != ("psum", "int8")],
)
@pytest.mark.parametrize("shares", [Shares(), Shares(0.5, 0.8, 0.7)])
def test_simulated_exchanges_equal_the_closed_form(algorithm, codec, p, shares):
    """Hosts are alike, and p divides n because psum does not declare how it cuts."""
    work = Workload(0.0, 64 * 64 * 105, algorithm, codec and INT8, codec)
    where = cluster(p, shares=shares)
    found = timing.simulate(where, work, width=1).exchanged[0].max()
    wanted = exchange_seconds(where, work)
    if algorithm == "tree" and p & (p - 1):
        # Some leaves of the tree have no level below to wait for, so they are never
        # later.
        assert 0.8 * wanted < found <= wanted
    else:
        assert math.isclose(found, wanted, rel_tol=1e-9)


def test_simulated_rounds_of_a_linear_codec_equal_the_closed_form():
    codec = codecs.power_sgd(2, jax.random.key(0)).of(((64, 32),))
    work = Workload(0.0, 64 * 32, "psum", codec, "int8")  # at the speed of int8
    found = timing.simulate(cluster(4), work, width=1).exchanged[0].max()
    assert math.isclose(found, exchange_seconds(cluster(4), work), rel_tol=1e-9)


def test_server_uses_both_directions_of_its_link():
    """It receives the next step's gradients while it sends this step's sum."""
    work = Workload(0.0, 10**6, "parameter_server")
    found = timing.simulate(cluster(8), work, width=1).step_time
    assert found < exchange_seconds(cluster(8), work)


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("seconds", [0.01, 0.2])
def test_simulated_steps_equal_the_closed_form(width, seconds):
    """A step takes `c + x` at width 1 and `max(c, x)` above."""
    work = Workload(seconds, 10**6, "ring")
    counts = timing.flat(cluster(4), "ring", 10**6)
    exchange = timing.duration(cluster(4), counts)
    compute = timing.Compute.of(seconds)
    found = timing.simulate(cluster(4), work, width, steps=20).step_time
    assert math.isclose(found, timing.pipelined_step_time(compute, exchange, width))


def test_straggler_sets_the_pace():
    work = Workload(0.2, 10**5, "ring", slow=(1, 1, 3, 1))
    found = timing.simulate(cluster(4), work, width=2).step_time
    assert math.isclose(found, 0.6, rel_tol=1e-6)


def test_wider_pipeline_absorbs_some_jitter():
    """At width 1 all devices wait for the slowest in a step; wider pipelines less."""
    work = Workload(0.1, 10**6, "two_shot", jitter=0.3)
    steps = [timing.simulate(cluster(8), work, k, steps=200) for k in (1, 2, 4)]
    one, two, four = (found.step_time for found in steps)
    even = dataclasses.replace(work, jitter=0.0)
    assert one > timing.simulate(cluster(8), even, 1).step_time
    assert one > two > four
    assert four > timing.simulate(cluster(8), even, 4).step_time * (1 - 1e-9)


def test_devices_share_the_link_of_their_host():
    """In a flat two-shot, all d devices of a host send through one link at once."""
    inner = Link(0.0, math.inf)
    where = cluster(4, devices=4, inner=inner, link=Link(0.0, 62.5e6), reduction=1e30)
    work = Workload(0.0, 16 * 10**4, "two_shot")
    found = timing.simulate(where, work, 1).step_time
    wanted = exchange_seconds(where, work)
    # In the closed form, the link is always busy. Here, some messages wait until both
    # ends are free.
    assert wanted * (1 - 1e-9) <= found < 2 * wanted


def test_simulation_of_4096_workers_equals_the_closed_form():
    """A ring has the latency of 2(p-1) hops, and halving that of 2 log2(p) hops."""
    where = cluster(4096, synchronisation=0.0)
    found = {
        name: timing.simulate(where, Workload(0.0, 4096, name), 1, steps=2).step_time
        for name in ("ring", "halving_doubling")
    }
    for name, seconds in found.items():
        assert math.isclose(seconds, exchange_seconds(where, Workload(0, 4096, name)))
    assert found["ring"] > 250 * found["halving_doubling"]


@pytest.mark.parametrize(("width", "steps"), [(2, 1), (0, 20), (1.5, 20), (2, 2.5)])
def test_too_few_steps_or_widths_are_refused(width, steps):
    says = f"at least 2 and `width` at least 1, got {steps}, {width}"
    with pytest.raises(ValueError, match=says):
        timing.simulate(cluster(2), Workload(0.1, 10), width, steps)


def test_slow_must_have_one_number_for_each_device():
    work = Workload(0.1, 10, slow=(1,))
    with pytest.raises(ValueError, match="`slow` must have one number for each of 2"):
        timing.simulate(cluster(2), work, width=2)


@pytest.mark.parametrize(("every", "overlap"), [(1, 0), (1, 1), (4, 0), (4, 2), (6, 6)])
@pytest.mark.parametrize("elements", [4_000, 4_000_000, 64_000_000])
def test_simulated_local_steps_equal_the_closed_form(every, overlap, elements):
    """Chunks cut the elements evenly; each has the latencies of an exchange."""
    work = Workload(0.1, elements, "ring")
    way = timing.TrainConfig(1, "ring")
    exchange = way.exchange(cluster(4), elements, None)
    wanted = timing.local_step_time(timing.Compute.of(0.1), exchange, every, overlap)
    rounds = dict(sync_every=every, overlap_steps=overlap)
    found = timing.simulate(cluster(4), work, 1, steps=8 * every, **rounds)
    assert math.isclose(found.step_time, wanted, rel_tol=1e-2)


def test_longer_rounds_wait_less_for_slow_steps():
    work = Workload(0.1, 1_000, "ring", jitter=0.5)
    times = [
        timing.simulate(cluster(8), work, 1, 256, sync_every=every).step_time
        for every in (1, 4, 16)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.3 * times[2]


@pytest.mark.parametrize(
    ("width", "every", "overlap", "message"),
    [
        (1, 2, 3, "`overlap_steps` must be at most `sync_every`"),
        (2, 2, 1, "`width` must be 1 with local steps"),
        (1, -1, 0, "`sync_every` must be an integer of at least 1"),
    ],
)
def test_bad_rounds_are_refused(width, every, overlap, message):
    rounds = dict(sync_every=every, overlap_steps=overlap)
    with pytest.raises(ValueError, match=message):
        timing.simulate(cluster(2), Workload(0.1, 10), width, **rounds)


@pytest.mark.parametrize("every", [3, 100])
@pytest.mark.parametrize("steps", [None, 700])
def test_step_time_is_a_mean_of_whole_rounds(every, steps):
    work = Workload(0.1, 64_000_000, "ring")
    exchange = timing.TrainConfig(1, "ring").exchange(cluster(4), 64_000_000, None)
    wanted = timing.local_step_time(timing.Compute.of(0.1), exchange, every, 0)
    found = timing.simulate(cluster(4), work, 1, steps, sync_every=every)
    assert math.isclose(found.step_time, wanted, rel_tol=1e-6)


def test_fewer_steps_than_two_rounds_are_refused():
    with pytest.raises(ValueError, match=r"`steps` must be .* at least 20 and"):
        timing.simulate(cluster(2), Workload(0.1, 10), 1, 19, sync_every=10)
