"""Tests plans: the fastest way comes first, and the simplest of equally fast ways."""

import dataclasses
import itertools
import math

import jax
import pytest

from pipejax import codecs, timing
from pipejax.timing import Cluster, CodecSpeed, Compute, Link

CODECS = {"int8": codecs.int8()}
CLUSTER = Cluster(
    4,
    Link(5e-5, 62.5e6),
    reduction=4e9,
    codecs={"int8": CodecSpeed(4e9, 4e9)},
)
N = 4_000_000  # 16 MB: a ring takes 384 ms, with int8 about 100


def best(compute, **changes):
    return timing.plan(CLUSTER, N, Compute.of(compute), CODECS, **changes)[0]


def test_compute_bound_plan_needs_no_codec():
    choice = best(0.5)
    assert (choice.config.width, choice.config.codec) == (2, None)
    assert choice.step == 0.5
    assert choice.ratio == 1
    assert "hidden behind compute" in choice.reason


def test_wire_bound_plan_uses_a_codec():
    choice = best(0.12)
    assert (choice.config.width, choice.config.codec) == (2, "int8")
    assert choice.step == 0.12
    assert "slack" in choice.reason


def test_plan_reports_exposed_time_of_a_compressed_exchange():
    choice = best(0.01)
    assert choice.config.codec == "int8"
    assert choice.step == choice.exchange.total > 0.09
    assert choice.reason.startswith("hides 10.0 ms of an exchange of")
    assert choice.reason.endswith("wire")


def test_wider_pipeline_is_not_chosen_without_a_gain():
    assert best(0.5, widths=(1, 2, 3)).config.width == 2
    alone = dataclasses.replace(CLUSTER, link=Link(0, 1e15), reduction=math.inf)
    assert timing.plan(alone, N, Compute.of(0.5))[0].config == timing.TrainConfig(
        1, "psum"
    )


def test_every_way_is_ranked_by_step_time():
    found = timing.plan(CLUSTER, N, Compute.of(0.1), CODECS)
    # There are six algorithms, and five with int8, at two widths. Width 1 has 1, 4 or
    # 16 buckets.
    assert len(found) == (3 + 1) * (6 + 5)
    assert len({choice.config for choice in found}) == len(found)
    steps = [choice.step for choice in found]
    assert all(b >= a * 0.99 for a, b in itertools.pairwise(steps))
    assert steps[-1] == max(steps)
    assert found[-1].config.algorithm == "parameter_server"
    assert found[-1].reason.startswith("waits 1548.1 ms for an exchange of 1548.1 ms")


@pytest.mark.parametrize("widths", [(1, 2), (2,)])
def test_gains_are_relative_to_the_fastest_uncompressed_exchange(widths):
    """Exchanging 16 MB takes 384 ms on the wire, 3 ms to add, and four latencies."""
    exchange = 2 * 3 / 4 * 16e6 / 62.5e6 + 3 / 4 * 16e6 / 4e9 + 4 * 5e-5
    found = timing.plan(CLUSTER, N, Compute.of(0.12), CODECS, widths)
    for choice in found:
        gains = choice.gains
        assert gains["synchronous"] == pytest.approx((0.12 + exchange) / choice.step)
        assert gains["overlapped"] == pytest.approx((0.04 + exchange) / choice.step)
    assert found[0].gains["synchronous"] > 4 / 3


def test_gains_include_hierarchical_all_reduces():
    """A hierarchical all-reduce is the fastest one of all bits on these hosts."""
    many = dataclasses.replace(CLUSTER, devices=8, inner=Link(1e-6, 1e11))
    found = timing.plan(many, N, Compute.of(0.12), CODECS)
    (d_sync,) = {c.d_sync for c in found}
    waits = [
        c.step
        for c in found
        if (c.config.width, c.config.codec, c.config.levels, c.config.buckets)
        == (1, None, True, 1)
    ]
    assert d_sync == min(waits)


def test_buckets_overlap_the_backward_pass_of_synchronous_steps():
    """A synchronous step has 0.2 s of backward pass, and 0.1 s before it."""
    found = timing.plan(CLUSTER, N, Compute.of(0.3), widths=(1,), buckets=(1, 64))
    assert found[0].config.buckets == 64
    alone, compute = found[0].config._replace(buckets=1), Compute.of(0.3)
    (plain,) = (choice for choice in found if choice.config == alone)
    ideal = timing.overlapped_step_time(compute, plain.exchange)
    assert ideal < found[0].step < ideal + 0.2 / 64 + 64 * 6 * 5e-5
    assert plain.step == pytest.approx(
        timing.synchronous_step_time(compute, plain.exchange)
    )
    assert "the rest beside the backward pass" in found[0].reason
    assert "beside" not in plain.reason
    wide = timing.plan(CLUSTER, N, compute, widths=(2, 3))
    assert {choice.config.buckets for choice in wide} == {1}


def test_levels_are_planned_for_hosts_with_several_devices():
    """Eight devices share a link: a two-shot with levels sends a seventh over it."""
    inner = Link(1e-6, 1e11)
    many = dataclasses.replace(CLUSTER, devices=8, inner=inner)
    choice = timing.plan(many, N, Compute.of(0.01), CODECS)[0]
    assert choice.config.codec == "int8"
    two = [
        c.step
        for levels in (True, False)
        for c in timing.plan(many, N, Compute.of(0.01), CODECS)
        if c.config == timing.TrainConfig(2, "two_shot", "int8", levels, 1)
    ]
    assert two[0] < two[1] / 6
    assert str(choice).startswith("width 2")


def test_scaling_falls_once_the_exchange_is_exposed():
    """The exchange is hidden while it is shorter than compute; ring latency grows."""
    compute = Compute.of(0.5)
    choice = best(0.5)
    curve = timing.scaling(CLUSTER, choice.config, N, compute)
    assert list(curve) == [2**i for i in range(13)]
    assert curve[1] == curve[4] == 1
    if choice.config.algorithm in ("psum", "ring"):
        assert curve[4096] < 1
    waits = timing.scaling(CLUSTER, choice.config._replace(width=1), N, compute)
    assert waits[1] == 1
    assert all(waits[p] < curve[p] for p in curve if p > 1)


def test_scaling_with_a_codec_stays_at_1():
    """The bytes of a host do not depend on p, so the exchange stays hidden."""
    way, compute = best(0.12).config, Compute.of(0.12)
    curve = timing.scaling(CLUSTER, way, N, compute, CODECS, hosts=(1, 4))
    assert curve == {1: 1, 4: 1}
    with pytest.raises(
        ValueError, match="`codecs` must contain the codec of `config`, 'int8'; got"
    ):
        timing.scaling(CLUSTER, way, N, compute)


POWER = codecs.error_feedback(codecs.power_sgd(4, jax.random.key(0)))
WITH_POWER = dataclasses.replace(
    CLUSTER, codecs={**CLUSTER.codecs, "power_sgd": CodecSpeed(1e9, 1e10)}
)


def test_power_sgd_is_planned_with_two_thin_matrices():
    """PowerSGD has rank 4, and is not used between hosts of several devices."""
    n = 3 * 2**20
    found = timing.plan(WITH_POWER, n, Compute.of(0.01), {"power_sgd": POWER})
    ways = {c.config: c for c in found if c.config.codec == "power_sgd"}
    assert {way.algorithm for way in ways} == {"psum", "tree", "parameter_server"}
    assert {way.buckets for way in ways} == {1}
    psum = ways[timing.TrainConfig(2, "psum", "power_sgd")].exchange
    assert psum.wire == pytest.approx(2 * 3 / 4 * 4 * 3 * 4 * 2 * 1024 / 62.5e6)
    assert psum.codec == pytest.approx(4 * n / 1e9 + 4 * n / 1e10)
    assert psum.latency == pytest.approx(2 * 6 * 5e-5)  # two rounds
    inner = Link(1e-6, 1e11)
    many = dataclasses.replace(WITH_POWER, devices=8, inner=inner)
    found = timing.plan(many, n, Compute.of(0.01), {"power_sgd": POWER})
    assert not any(c.config.levels for c in found if c.config.codec)


def test_power_sgd_is_planned_for_the_leaves_of_a_model():
    leaves = ((512, 512), (100,))
    n = 512 * 512 + 100
    given = (WITH_POWER, n, Compute.of(0.01), {"power_sgd": POWER})
    found = timing.plan(*given, leaves=leaves)
    (psum,) = (
        c
        for c in found
        if c.config == timing.TrainConfig(2, "psum", "power_sgd", False, 1)
    )
    sent = 4 * (4 * 2 * 512 + 100)
    assert psum.exchange.wire == pytest.approx(2 * 3 / 4 * sent / 62.5e6)
    curve = timing.scaling(
        *given[:1], psum.config, *given[1:], hosts=(4,), leaves=leaves
    )
    assert curve[4] == pytest.approx(0.01 / psum.step)
    with pytest.raises(ValueError, match=f"`leaves` must have the {n} elements of the"):
        timing.plan(*given, leaves=((512, 512),))


def test_codec_with_fewest_dropped_bits_wins_at_equal_speed():
    """All codecs are hidden behind 0.35 s, and the exchange of all bits is not."""
    speeds = {name: CodecSpeed(1e12, 1e12) for name in ("bf16", "int8", "power_sgd")}
    cluster = Cluster(4, Link(5e-5, 40e6), codecs=speeds)
    known = {"power_sgd": POWER, "int8": codecs.int8(), "bf16": codecs.bf16()}
    found = timing.plan(cluster, N, Compute.of(0.35), known)
    hidden = [c.config.codec for c in found if c.step == 0.35]
    assert list(dict.fromkeys(hidden)) == ["bf16", "int8", "power_sgd"]


def test_algorithm_with_fewest_encodings_wins_at_equal_speed():
    """A ring and a tree encode partial sums again at every hop."""
    found = timing.plan(CLUSTER, N, Compute.of(0.35), CODECS)
    hidden = [c for c in found if c.step == 0.35 and c.config.codec == "int8"]
    times = {c.config.algorithm: c.encodings for c in hidden}
    assert times == {"two_shot": 2, "tree": 3, "halving_doubling": 3, "ring": 4}
    assert list(times.values()) == sorted(times.values())
    assert {c.encodings for c in found if c.config.codec is None} == {0}


def test_codec_of_unknown_speed_is_refused():
    with pytest.raises(ValueError, match="`codec` must be one of the cluster's codecs"):
        timing.plan(CLUSTER, N, Compute.of(0.1), {"sign": codecs.sign()})


def test_baseline_in_bfloat16_sends_half_of_the_bytes():
    """Gains are those over D-Sync of half as many elements; step times stay."""
    whole, half = (
        timing.plan(CLUSTER, n, Compute.of(0.12), CODECS) for n in (N, N // 2)
    )
    found = timing.plan(CLUSTER, N, Compute.of(0.12), CODECS, baseline_bytes=2)
    assert [x.step for x in found] == [x.step for x in whole]
    assert found[0].d_sync == half[0].d_sync < whole[0].d_sync
    assert found[0].overlapped == half[0].overlapped


@pytest.mark.parametrize("elements", [0, -5, 1.5])
def test_gradient_without_whole_elements_is_refused(elements):
    says = f"^`elements` must be a whole number of elements above 0; got {elements}"
    with pytest.raises(ValueError, match=says):
        timing.plan(CLUSTER, elements, Compute.of(0.1))
    with pytest.raises(ValueError, match=says):
        timing.scaling(
            CLUSTER, timing.TrainConfig(2, "ring"), elements, Compute.of(0.1)
        )


@pytest.mark.parametrize("change", [{"buckets": (0,)}, {"buckets": (1.5,)}])
def test_gradient_in_no_whole_number_of_buckets_is_refused(change):
    with pytest.raises(ValueError, match=r"^`buckets` must be a whole number above 0"):
        timing.plan(CLUSTER, N, Compute.of(0.1), **change)


def test_scaling_without_compute_is_refused():
    way = timing.TrainConfig(2, "ring")
    with pytest.raises(ValueError, match=r"^`compute` must take time, of which the"):
        timing.scaling(CLUSTER, way, 1000, Compute.of(0.0), hosts=(1,))


@pytest.mark.parametrize("value", [0, 5, 2.0, "bf16"])
def test_baseline_of_impossible_size_is_refused(value):
    with pytest.raises(ValueError, match=r"^`baseline_bytes` must be a whole number"):
        timing.plan(CLUSTER, N, Compute.of(0.12), baseline_bytes=value)


@pytest.mark.parametrize(
    "change",
    [
        {"link": Link(0.0, 5e-324)},
        {"shares": timing.Shares(shuffle=1e-320)},
        {"synchronisation": 1e308},
    ],
)
def test_times_beyond_the_finite_range_are_refused(change):
    cluster = dataclasses.replace(Cluster(4, Link(5e-5, 62.5e6)), **change)
    with pytest.raises(ValueError, match=r"^`cluster` must have times, speeds and sh"):
        timing.plan(cluster, 10**6, Compute.of(0.1))


def test_trillion_elements_are_counted_by_shape():
    """Their leaves are counted by shape, and not one after another."""
    codec = codecs.power_sgd(4, jax.random.key(0)).of(timing.square_leaves(10**10))
    _, second = codec.round_sizes(10**10)
    matrices, rest = divmod(10**10, 1024**2)
    assert codec.size(10**10) == 4 * sum(codec.round_sizes(10**10))
    assert second < 4 * 1024 * (matrices + 1) + rest


def test_plan_counts_the_means_of_predictions_by_host():
    """1e9 elements on 2 x 8 devices, whose mean takes 2 * 7/8 * 4 GB at 100 GB/s.

    It makes predictions better, so ways with it come first all the same.
    """
    inner = timing.Link(0.0, 7e9 / 0.07)
    cluster = timing.Cluster(2, timing.Link(0.0, 1e12), devices=8, inner=inner)
    compute = timing.Compute.of(1.0)
    found = timing.plan(cluster, 10**9, compute, buckets=(1,))
    steps = {str(choice.config): choice.step for choice in found}
    assert steps["width 2, psum, uncompressed"] == pytest.approx(1.07)
    assert steps["width 2, hierarchical, psum, uncompressed"] == pytest.approx(1.07)
    assert steps["width 2, ring, uncompressed"] == pytest.approx(1.0)
    pipelined = next(choice for choice in found if choice.config.width == 2)
    assert pipelined.config.predicts_by_host(cluster)
    way = timing.TrainConfig(2, "psum")
    curve = timing.scaling(cluster, way, 10**9, compute, hosts=(1, 2))
    assert curve == {1: pytest.approx(1.0), 2: pytest.approx(1 / 1.07)}
