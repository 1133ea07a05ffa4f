"""Tests the ways to train with a sharded optimizer, and their step times."""

import jax
import pytest

import pipejax as pj
from pipejax import timing
from pipejax.collectives import has_reduce_scatter

COMPUTE = timing.Compute(1.0, 2.0, update=0.4)
LINK = timing.Link(50e-6, 125e6)


def way(seconds, config, codec=0.0):
    exchange = timing.Duration(0, seconds - codec, 0, codec, 0)
    return timing.RankedConfig(config, exchange, 0.0, COMPUTE.total, 1.0, 1.0)


@pytest.mark.parametrize(
    ("seconds", "step", "reason"),
    [
        (0.0, 3.2, "hidden behind compute that is 100.0 ms longer, 100% slack"),
        (1.5, 3.2, "hidden behind compute that is 100.0 ms longer, 25% slack"),
        (2.0, 3.2, "hidden behind compute that is 100.0 ms longer, 0% slack"),
        (3.0, 3.7, "hides 2400.0 ms of an exchange of 3000.0 ms: wire"),
        (6.0, 6.2, "hides 2900.0 ms of an exchange of 6000.0 ms: wire"),
    ],
)
def test_half_of_the_exchange_hides_behind_each_pass(seconds, step, reason):
    # The second half also moves slopes of 8 bits.
    choice = way(seconds / ((1 + 1.25) / 2), timing.TrainConfig(2, "ring"))
    (found,) = timing.shard_optimizer([choice], COMPUTE, 4)
    assert found.config == choice.config._replace(shard_optimizer=True)
    assert found.step == pytest.approx(step)
    assert found.ratio == pytest.approx(step / 3.1)
    assert found.reason == reason


def test_sharded_optimizer_on_one_core_takes_a_pipelined_step():
    """The host executor hides all of the exchange, and the codec adds to compute."""
    choice = way(3.0, timing.TrainConfig(2, "ring"), codec=0.5)
    (found,) = timing.shard_optimizer([choice], COMPUTE, 4, one_core=True)
    own = timing.Compute(1.0, 2.0, update=0.1)
    wanted = timing.pipelined_step_time(own, found.exchange, one_core=True)
    assert found.step == wanted == pytest.approx(3.2 + 1.125 * 0.5)
    assert found.reason == "hidden behind compute that is 662.5 ms longer, 10% slack"


def test_codec_of_a_sharded_optimizer_encodes_the_first_half():
    exchanges = {
        None: timing.Duration(0.1, 4.0, 0.5, 0.0, 0.1),
        "int8": timing.Duration(0.1, 1.0, 0.5, 0.2, 0.1),
    }
    for width, slopes in ((1, 1.0), (2, 1.25)):
        ways = [
            way(0.0, timing.TrainConfig(width, "ring", codec))._replace(exchange=x)
            for codec, x in exchanges.items()
        ]
        found = timing.shard_optimizer(ways, COMPUTE, 4)
        (coded,) = (x.exchange for x in found if x.config.codec)
        wire = (1.0 + slopes * 4.0) / 2
        assert coded == pytest.approx((0.1, wire, 0.5, 0.1, 0.1))


def test_sharded_optimizer_is_planned_for_algorithms_with_halves():
    ranked = timing.plan(timing.Cluster(4, LINK), 4_000_000, COMPUTE)
    found = timing.shard_optimizer(ranked, COMPUTE, 4)
    assert all(choice.config.buckets == 1 for choice in found)
    assert [choice.step for choice in found] == sorted(x.step for x in found)
    for choice in found:
        if choice.config.width == 1:
            assert choice.step == pytest.approx(3.1 + choice.exchange.total)


@pytest.mark.parametrize("devices", [2, 3, 4, 6])
def test_planned_algorithms_are_accepted_by_a_train_step(devices):
    ranked = timing.plan(timing.Cluster(devices, LINK), 4_000_000, COMPUTE)
    found = timing.shard_optimizer(ranked, COMPUTE, devices)
    assert {choice.config.algorithm for choice in found} == {
        name
        for name in timing.COST_MODELS
        if has_reduce_scatter(getattr(pj.collectives, name)(), devices)
    }


def test_codec_is_left_out_where_the_gain_is_below_one_percent():
    """Half of the exchange takes 270.2 ms, and the forward pass 270 ms."""
    speeds = {"bf16": timing.CodecSpeed(1e12, 1e12)}
    cluster = timing.Cluster(4, LINK, codecs=speeds)
    compute = timing.Compute.of(0.81)
    ranked = timing.plan(cluster, 10**7, compute, {"bf16": pj.codecs.bf16()})
    found = timing.shard_optimizer(ranked, compute, 4)
    steps = {choice.config.codec: choice.step for choice in reversed(found)}
    assert steps["bf16"] < steps[None] < 1.01 * steps["bf16"]
    assert (found[0].config.width, found[0].config.codec) == (2, None)


def test_efficiency_with_a_sharded_optimizer_follows_its_step_time():
    compute = timing.Compute(0.2, 0.4, update=0.08)
    ranked = timing.plan(timing.Cluster(4, LINK), 12_000_000, compute)
    best = timing.shard_optimizer(ranked, compute, 4)[0]
    curve = timing.scaling(
        timing.Cluster(4, LINK), best.config, 12_000_000, compute, hosts=(4,)
    )
    assert curve == {4: pytest.approx(compute.total / best.step)}


def test_low_rank_codec_is_left_out_of_a_sharded_optimizer():
    codec = pj.codecs.error_feedback(pj.codecs.power_sgd(4, jax.random.key(0)))
    speeds = {"power_sgd": timing.CodecSpeed(1e9, 1e9)}
    cluster = timing.Cluster(4, LINK, codecs=speeds)
    ranked = timing.plan(cluster, 1024 * 1024, COMPUTE, {"power_sgd": codec})
    found = timing.shard_optimizer(ranked, COMPUTE, 4)
    assert {choice.config.codec for choice in found} == {None}


@pytest.mark.parametrize("devices", [0, -4, 1.5])
def test_optimizer_shared_by_no_device_is_refused(devices):
    with pytest.raises(ValueError, match=r"^`devices` must be a whole number above 0"):
        timing.shard_optimizer([], COMPUTE, devices)


def test_way_without_its_uncompressed_twin_is_refused():
    coded = way(1.0, timing.TrainConfig(2, "ring", "int8"))
    with pytest.raises(ValueError, match=r"`choices` must hold each way with a codec"):
        timing.shard_optimizer([coded], COMPUTE, 4)
