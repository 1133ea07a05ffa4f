"""Tests which local steps are considered, and how long they take."""

import pytest

from pipejax import codecs, timing

COMPUTE = timing.Compute.of(0.25)
SLOW = timing.Cluster(4, timing.Link(50e-6, 1.25e6))


def ways(elements=4_000_000, cluster=SLOW, **options):
    ranked = timing.plan(cluster, elements, COMPUTE, **options)
    return ranked, timing.local_steps(ranked, COMPUTE)


def test_exchange_without_a_pause_costs_no_time():
    _, found = ways()
    for way in found:
        steps = -(-way.exchange.total // 0.25)
        if way.config.overlap_steps:
            assert way.config.sync_every == way.config.overlap_steps == steps
            assert way.step == pytest.approx(0.25)
        else:
            assert way.config.sync_every in (steps, 4 * steps, 16 * steps)
            share = way.exchange.total / way.config.sync_every
            assert way.step == pytest.approx(0.25 + share)


def test_shorter_steps_and_then_shorter_rounds_come_first():
    ranked, found = ways()
    steps = [way.step for way in found]
    assert steps == pytest.approx(sorted(steps), rel=0.01)
    hidden = [way for way in found if way.config.overlap_steps]
    assert found[: len(hidden)] == hidden
    rounds = [way.config.sync_every for way in hidden]
    assert rounds == sorted(rounds)
    assert {way.config.algorithm for way in hidden} == {
        way.config.algorithm for way in ranked
    }


def test_local_steps_have_one_bucket():
    _, found = ways()
    assert all(way.config.width == way.config.buckets == 1 for way in found)


def test_fast_exchange_is_hidden_by_one_step():
    _, found = ways(elements=1_000)
    assert (found[0].config.sync_every, found[0].config.overlap_steps) == (1, 1)


def test_compute_without_time_is_refused():
    ranked = timing.plan(SLOW, 1_000, timing.Compute.of(0.0))
    with pytest.raises(ValueError, match="`compute` must take time"):
        timing.local_steps(ranked, timing.Compute.of(0.0))


def test_shorter_round_comes_first_among_steps_within_one_percent():
    compute = timing.Compute.of(0.25)
    link = timing.Link(50e-6, 1.25e6)
    int8 = {"int8": timing.CodecSpeed(5e9, 5e9)}
    cluster = timing.Cluster(4, link, codecs=int8)
    ranked = timing.plan(
        cluster, 4_000_000, compute, {"int8": codecs.int8()}, one_core=True
    )
    first = timing.local_steps(ranked, compute, one_core=True)[0]
    exact = [way for way in ranked if way.config.codec is None]
    longer = timing.local_steps(exact, compute, one_core=True)[0]
    assert first.config.codec == "int8"  # whose work takes time of the only core
    assert longer.step < first.step < 1.01 * longer.step
    assert first.config.sync_every < longer.config.sync_every
