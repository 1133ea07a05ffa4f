"""Tests durations of exchanges against the paper's closed forms, and between hosts."""

import dataclasses
import functools
import itertools
import math
import re

import pytest

from pipejax import codecs
from pipejax.timing import (
    Cluster,
    CodecSpeed,
    Counts,
    Link,
    Shares,
    duration,
    flat,
    hierarchical,
)

from .test_counts import CODECS, PAIRS

ALPHA, BETA, GAMMA, S = 1e-4, 1 / 62.5e6, 1 / 4e9, 1e-3
SLOW = Link(ALPHA, 1 / BETA)


def cluster(hosts, **changes):
    plain = Cluster(hosts, SLOW, reduction=1 / GAMMA, synchronisation=S)
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize("p", [2, 4, 8, 64])
def test_durations_equal_the_closed_forms_of_the_paper(p):
    n = 4096 * p  # bytes
    wire, gamma, several = 2 * (p - 1) / p * n * BETA, n * GAMMA, p - 1
    wanted = {
        "psum": 2 * several * ALPHA + wire + several / p * gamma + S,
        "ring": 2 * several * (ALPHA + S) + wire + several / p * gamma,
        "halving_doubling": (
            2 * math.log2(p) * (ALPHA + S) + wire + several / p * gamma
        ),
        "parameter_server": (
            2 * ALPHA + 2 * several * (n * BETA + S) + several * gamma
        ),
    }
    for algorithm, seconds in wanted.items():
        found = duration(cluster(p), flat(cluster(p), algorithm, n // 4))
        assert math.isclose(found.total, seconds), algorithm
        assert math.isclose(found.total, sum(found))


@pytest.mark.parametrize(
    ("algorithm", "codec"), [pair for pair in PAIRS if pair[1] is not None]
)
def test_time_of_a_codec_follows_its_speed(algorithm, codec):
    """A codec that is twice as fast takes half as long, and changes nothing else."""
    slow = cluster(4, codecs={codec: CodecSpeed(1e9, 2e9)})
    fast = cluster(4, codecs={codec: CodecSpeed(2e9, 4e9)})
    exchange = flat(slow, algorithm, 10_000, CODECS[codec])
    a, b = duration(slow, exchange, codec), duration(fast, exchange, codec)
    counts = exchange.between
    assert math.isclose(a.codec, counts.encoded / 1e9 + counts.decoded / 2e9)
    assert a._replace(codec=0) == b._replace(codec=0)
    assert math.isclose(a.codec, 2 * b.codec)
    assert a.computed == a.codec + a.reduction


HOSTS = Cluster(4, SLOW, devices=2, inner=Link(1e-5, 1e10), reduction=1 / GAMMA)


def test_hierarchical_exchange_sends_a_share_between_hosts():
    """Each of d devices moves a d-th of the vector, through one link."""
    n = 4096
    found = hierarchical(HOSTS, "two_shot", n)
    assert found.between.wire == 2 * 3 / 4 * 4 * n
    assert found.inside.wire == 2 * 1 / 2 * 4 * n
    coded = hierarchical(HOSTS, "two_shot", n, codecs.int8())
    assert coded.inside == found.inside
    assert coded.between.wire < 0.26 * found.between.wire


def test_flat_exchange_counts_bytes_between_hosts():
    """Two-shot sends to 6 of 7 devices elsewhere; a ring from one device of a host."""
    n = 4096
    once = 2 * 7 / 8 * 4 * n
    assert flat(HOSTS, "ring", n).between.wire == once
    assert math.isclose(flat(HOSTS, "two_shot", n).between.wire, 2 * 6 / 7 * once)
    server = flat(HOSTS, "parameter_server", n).between.wire
    assert math.isclose(server, 2 * 6 * 4 * n)
    assert flat(HOSTS, "tree", n).between.wire == 2 * 2 * 4 * n
    one = dataclasses.replace(HOSTS, hosts=1)
    assert flat(one, "ring", n).between == Counts()


@pytest.mark.parametrize(
    ("algorithm", "p", "factor"),
    [
        ("psum", 2, 1),  # the backend's own
        ("ring", 2, 2),  # the next device is also the one before
        ("ring", 4, 1.25),
        ("two_shot", 2, 2.5),
        ("two_shot", 3, 2.5),  # half of the bytes take four times as long
        ("halving_doubling", 8, 2),
        # Eight of 14 payloads go to and from the fifth device.
        ("halving_doubling", 5, 10 / 7),
        ("tree", 4, 1),
        ("parameter_server", 4, 1),
    ],
)
def test_wire_time_grows_with_the_share_of_the_link(algorithm, p, factor):
    exchange = flat(cluster(p), algorithm, 2**10 * 105)
    some = cluster(p, shares=Shares(pair=1 / 2, shift=4 / 5, shuffle=1 / 4))
    found = duration(some, exchange).wire / duration(cluster(p), exchange).wire
    assert math.isclose(found, factor)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: flat(HOSTS, "rings", 4), "`algorithm` must be one of psum, ring"),
        (
            lambda: duration(HOSTS, flat(HOSTS, "ring", 4), "int8"),
            "`codec` must be one of the cluster's codecs, []; got 'int8'",
        ),
        *(
            (functools.partial(f, HOSTS, "ring", n), "`n` must be a whole number of el")
            for f, n in itertools.product((flat, hierarchical), (0, -5, 1.5, math.nan))
        ),
    ],
)
def test_bad_arguments_of_exchange_are_refused(make, says):
    with pytest.raises(ValueError, match="^" + re.escape(says)):
        make()
