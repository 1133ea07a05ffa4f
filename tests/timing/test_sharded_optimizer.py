"""Tests the step times with a sharded optimizer."""

import jax
import pytest

import pipejax as pj
from pipejax import timing

COMPUTE = timing.Compute(1.0, 2.0, update=0.4)


@pytest.mark.parametrize(
    ("seconds", "wanted"), [(0.0, 3.1), (2.0, 3.1), (3.0, 3.6), (6.0, 6.1)]
)
def test_half_of_the_exchange_hides_behind_each_pass(seconds, wanted):
    exchange = timing.Duration(0, seconds, 0, 0, 0)
    way = timing.TrainConfig(2, "ring")
    choice = timing.RankedConfig(way, exchange, 0.0, COMPUTE.total, 1.0, 1.0)
    (found,) = timing.shard_optimizer([choice], COMPUTE, 4)
    assert found == choice._replace(step=pytest.approx(wanted))


def test_sharded_optimizer_is_planned_for_algorithms_with_halves():
    cluster = timing.Cluster(4, timing.Link(50e-6, 125e6))
    ranked = timing.plan(cluster, 4_000_000, COMPUTE)
    found = timing.shard_optimizer(ranked, COMPUTE, 4)
    algorithms = {choice.config.algorithm for choice in found}
    assert algorithms == {"psum", "two_shot", "ring", "halving_doubling"}
    assert all(choice.config.buckets == 1 for choice in found)
    assert [choice.step for choice in found] == sorted(x.step for x in found)
    for choice in found:
        if choice.config.width == 1:
            assert choice.step == pytest.approx(3.1 + choice.exchange.total)


def test_low_rank_codec_is_left_out_of_a_sharded_optimizer():
    codec = pj.codecs.error_feedback(pj.codecs.power_sgd(4, jax.random.key(0)))
    speeds = {"power_sgd": timing.CodecSpeed(1e9, 1e9)}
    cluster = timing.Cluster(4, timing.Link(50e-6, 125e6), codecs=speeds)
    ranked = timing.plan(cluster, 1024 * 1024, COMPUTE, {"power_sgd": codec})
    found = timing.shard_optimizer(ranked, COMPUTE, 4)
    assert {choice.config.codec for choice in found} == {None}
