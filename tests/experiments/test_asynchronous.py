"""Tests the step time of PS-Async, simulated and in closed form, by hand."""

import math

import numpy as np

from experiments.asynchronous import asynchronous_step_time, simulate_asynchronous
from pipejax import timing
from pipejax.timing import Cluster, Link, Workload


def cluster(hosts):
    return Cluster(hosts, Link(1e-4, 62.5e6), reduction=4e9)


def test_updates_of_four_workers_come_at_times_by_hand():
    """They compute for 3.5 s, and every transfer takes 1 s of the server's link."""
    four = Cluster(4, Link(0.0, 4e6))
    applied = simulate_asynchronous(four, Workload(3.5, 10**6), steps=1)
    assert applied.tolist() == [3.5, 5.5, 6.5, 7.5]


def test_workers_wait_only_for_the_server():
    """The closed form holds if compute or the server's link is the limit."""
    for seconds, elements in ((1.0, 10**4), (0.001, 10**6)):
        work = Workload(seconds, elements)
        applied = simulate_asynchronous(cluster(8), work, steps=100)
        assert applied.size == 8 * 100
        compute = timing.Compute.of(seconds)
        wanted = asynchronous_step_time(cluster(8), compute, elements)
        # The first pulls come one after another, before there are pushes.
        assert math.isclose(applied[-1] / 100, wanted, rel_tol=0.03)


def test_asynchronous_step_is_limited_by_worker_or_server_link():
    """The limit is a worker's own cycle, then the server's link."""
    link, compute = Link(0.0, 4e6), timing.Compute(1.0, 2.0, 0.5)
    assert asynchronous_step_time(Cluster(1, link), compute, 10**6) == 3.5
    assert asynchronous_step_time(Cluster(4, link), compute, 10**6) == 5.5
    assert asynchronous_step_time(Cluster(9, link), compute, 10**6) == 8.0
    slow = Cluster(4, link, reduction=1e6)
    assert asynchronous_step_time(slow, compute, 10**6) == 12.0


def test_straggler_does_not_hold_up_the_others():
    work = Workload(0.1, 10**4, slow=(1, 1, 1, 10))
    applied = simulate_asynchronous(cluster(4), work, steps=20)
    assert np.median(applied) < 3.0
    assert timing.simulate(cluster(4), work, 1).step_time > 1.0
