"""Tests ways to train: step times from made-up exchanges, and their reasons."""

import dataclasses

import pytest

from pipejax import codecs
from pipejax.timing import (
    Cluster,
    CodecSpeed,
    Compute,
    Duration,
    Link,
    RankedConfig,
    TrainConfig,
)

COMPUTE = Compute(forward=0.1, backward=0.2, update=0.03)


def exchange(wire=0.0, codec=0.0):
    return Duration(0.0, wire, 0.0, codec, 0.0)


@pytest.mark.parametrize(
    ("way", "says"),
    [
        (TrainConfig(1, "psum"), "width 1, psum, uncompressed"),
        (TrainConfig(2, "ring", "int8"), "width 2, ring, int8"),
        (
            TrainConfig(2, "tree", levels=True),
            "width 2, hierarchical, tree, uncompressed",
        ),
        (TrainConfig(1, "ring", buckets=4), "width 1, ring, uncompressed, 4 buckets"),
        (TrainConfig(1, "ring", sync_every=8), "H = 8, at once, ring, uncompressed"),
        (
            TrainConfig(1, "ring", sync_every=8, overlap_steps=4),
            "H = 8, V = 4, ring, uncompressed",
        ),
    ],
)
def test_way_is_printed_by_its_settings(way, says):
    assert str(way) == says


def test_exchange_of_a_way_is_one_bucket():
    """Three buckets of 10 elements have 4 each; psum on 4 devices sends 2 * 3/4."""
    cluster = Cluster(4, Link(0.0, 1.0))
    assert (
        TrainConfig(1, "psum", buckets=3).exchange(cluster, 10, None).wire == 1.5 * 16
    )
    assert TrainConfig(1, "psum").exchange(cluster, 10, None).wire == 1.5 * 40


def test_exchange_on_one_device_takes_no_time():
    speeds = {"int8": CodecSpeed(1.0, 1.0)}
    alone = Cluster(1, Link(1.0, 1.0), codecs=speeds, synchronisation=1.0)
    way = TrainConfig(2, "ring", "int8")
    assert way.exchange(alone, 1000, codecs.int8()) == Duration(0, 0, 0, 0, 0)


def test_levels_send_a_share_of_the_vector_between_hosts():
    """Two hosts of two devices send 4 n bytes over a link; a flat psum sends 3/2."""
    cluster = Cluster(2, Link(0.0, 1.0), devices=2, inner=Link(0.0, float("inf")))
    assert TrainConfig(2, "psum", levels=True).exchange(cluster, 100, None).wire == 400
    assert TrainConfig(2, "psum").exchange(cluster, 100, None).wire == 600


@pytest.mark.parametrize(
    ("way", "one_core", "seconds"),
    [
        # The step waits: 0.33 + 0.5.
        (TrainConfig(1, "psum"), False, 0.83),
        # Each half is exchanged beside the backward pass: 0.1 + (0.1 + 2 * 0.5) + 0.03.
        (TrainConfig(1, "psum", buckets=2), False, 1.23),
        # The exchange takes longer than 0.36: 0.33 and an update for the prediction.
        (TrainConfig(2, "psum"), False, 0.5),
        # Half of the exchange takes longer than both passes; the update and that of the
        # prediction follow.
        (TrainConfig(2, "psum", shard_optimizer=True), False, 0.25 + 0.25 + 0.06),
        (TrainConfig(2, "psum", shard_optimizer=True), True, 0.56),
        (TrainConfig(1, "psum", shard_optimizer=True), False, 0.83),
        # The exchange is hidden if 0.2 of it runs on the model's core.
        (TrainConfig(2, "psum"), True, 0.56),
    ],
)
def test_step_time_of_a_way_equals_numbers_by_hand(way, one_core, seconds):
    found = way.step(COMPUTE, exchange(wire=0.3, codec=0.2), one_core=one_core)
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("way", "wire", "step", "says"),
    [
        (
            TrainConfig(1, "psum"),
            0.25,
            0.75,
            "waits 250.0 ms for an exchange of 250.0 ms, most of it wire",
        ),
        (
            TrainConfig(1, "psum", buckets=4),
            0.125,
            0.625,
            "waits 125.0 ms for an exchange of 500.0 ms, most of it wire, the rest"
            " beside the backward pass",
        ),
        (
            TrainConfig(2, "psum"),
            0.125,
            0.5,
            "hidden behind compute, 75% slack",
        ),
        (
            TrainConfig(2, "psum"),
            0.75,
            0.75,
            "hides 500.0 ms of an exchange of 750.0 ms: wire",
        ),
        # A codec on the model's core, or a prediction, makes compute longer.
        (
            TrainConfig(2, "psum"),
            0.5625,
            0.75,
            "hidden behind compute that is 250.0 ms longer, 25% slack",
        ),
    ],
)
def test_reason_of_a_choice_tells_where_time_goes(way, wire, step, says):
    choice = RankedConfig(
        way, exchange(wire=wire), step, 0.5, d_sync=1.5, overlapped=1.25
    )
    assert choice.reason == says
    assert choice.ratio == step / 0.5
    assert choice.gains == {"synchronous": 1.5 / step, "overlapped": 1.25 / step}
    assert (
        str(choice) == f"{way!s:<64}{1e3 * step:9.1f} ms  {2 * step:5.2f} x compute "
        f" gain {1.5 / step:.2f} ({1.25 / step:.2f}) "
        f" {says}"
    )


def test_ratio_without_compute_is_infinite():
    way = TrainConfig(2, "psum")
    assert RankedConfig(way, exchange(1.0), 1.0, 0.0, 1.0, 1.0).ratio == float("inf")
    nothing = RankedConfig(way, exchange(), 0.0, 0.0, 0.0, 0.0)
    assert nothing.reason.startswith("hidden behind compute, 0% slack")
    assert nothing.gains == {"synchronous": float("inf"), "overlapped": float("inf")}


TWO = Cluster(2, Link(0.0, 1e9), devices=4, inner=Link(0.0, 4e9))


@pytest.mark.parametrize(
    ("way", "by_host"),
    [
        (TrainConfig(2, "ring", levels=True), True),
        (TrainConfig(2, "psum"), True),
        (TrainConfig(2, "psum", shard_optimizer=True), False),
        (TrainConfig(2, "ring"), False),
        (TrainConfig(1, "ring", levels=True), False),
    ],
)
def test_prediction_by_host_has_a_mean_inside(way, by_host):
    """A device sends 2 * 3/4 of 4 GB to the others of its host, at 4 GB/s."""
    assert way.predicts_by_host(TWO) == by_host
    own, sent = way.own(COMPUTE, TWO, 10**9), exchange(wire=0.05)
    assert own.inside == (1.5 if by_host else 0.0)
    alone = dataclasses.replace(own, inside=0.0)
    assert own.total == pytest.approx(alone.total + own.inside)
    longer = way.step(own, sent) - way.step(alone, sent)
    assert longer == pytest.approx(own.inside)


@pytest.mark.parametrize("levels", [False, True])
def test_processes_of_a_cpu_host_predict_alone(levels):
    way = TrainConfig(2, "psum", levels=levels)
    assert not way.predicts_by_host(TWO, one_core=True)
    assert way.own(COMPUTE, TWO, 10**9, one_core=True) == COMPUTE


def test_sharded_optimizer_divides_the_update_alone():
    way = TrainConfig(2, "ring", shard_optimizer=True)
    own = way.own(Compute(1.0, 2.0, update=0.8), TWO, 10**9)
    assert own == Compute(1.0, 2.0, update=0.1)


def test_single_host_has_no_mean_before_the_exchange():
    one = Cluster(1, Link(0.0, 1e9), devices=8, inner=Link(0.0, 4e9))
    assert TrainConfig(2, "psum").own(COMPUTE, one, 10**9) == COMPUTE


def test_buckets_are_encoded_by_the_computing_core():
    """16 buckets: 0.05 s on the wire and 0.03 s of codec beside 0.1 s of compute."""
    way, compute = TrainConfig(1, "ring", "int8", buckets=16), Compute.of(0.1)
    bucket = Duration(0.0, 0.05 / 16, 0.0, 0.03 / 16, 0.0)
    assert way.step(compute, bucket, one_core=True) == pytest.approx(0.13)
    assert way.step(compute, bucket, one_core=False) < 0.13


@pytest.mark.parametrize(
    ("overlap", "says"), [(0, "and waits for an exchange"), (8, "beside an exchange")]
)
def test_reason_of_local_steps_names_a_wait(overlap, says):
    way = TrainConfig(1, "ring", sync_every=8, overlap_steps=overlap)
    found = RankedConfig(way, exchange(wire=2.0), 0.5, 0.25, 2.25, 2.1)
    assert says in found.reason
