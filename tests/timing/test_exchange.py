"""Closed forms: against the paper's, against what our algorithms say they send."""

import dataclasses
import math
import re

import jax
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives, timing
from pipejax.collectives import Layout
from pipejax.mesh import on_mesh
from pipejax.timing import (
    FORMS,
    Cluster,
    CodecSpeed,
    Counts,
    Link,
    Shares,
    duration,
    flat,
    hierarchical,
    per_leaf,
)

ALPHA, BETA, GAMMA, S = 1e-4, 1 / 62.5e6, 1 / 4e9, 1e-3
SLOW = Link(ALPHA, 1 / BETA)
CODECS = {"int8": codecs.int8(), "top_k": codecs.error_feedback(codecs.top_k(0.1))}
PAIRS = [(a, c) for a in FORMS for c in (None, *CODECS) if a != "psum" or not c]


def cluster(hosts, **changes):
    plain = Cluster(hosts, SLOW, reduction=1 / GAMMA, synchronisation=S)
    return dataclasses.replace(plain, **changes)


def declared(algorithm, codec, p, n, shapes=None):
    """What the collective of that name says it moves."""
    make, found = getattr(collectives, algorithm), []
    all_reduce = make() if codec is None else make(codec)

    layout = Layout.of_shapes(shapes or ((n,),))

    def local(arrays):
        stages = all_reduce(layout, "data")
        found.extend(stages.transfers)
        return collectives.run(stages, collectives.Summands(arrays))[0]

    mapped = on_mesh(local, pj.data_mesh(p), P(), P())
    jax.eval_shape(mapped, layout.coded)
    return found


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize(("algorithm", "codec"), PAIRS)
@pytest.mark.parametrize("n", [1, 1000])
def test_counts_are_those_of_the_collectives(algorithm, codec, p, n):
    chosen = CODECS.get(codec)
    counts = FORMS[algorithm](p, n, chosen)
    sent = declared(algorithm, chosen, p, n)
    if algorithm == "psum":  # by the backend, which does not say how it cuts
        assert math.isclose(counts.wire, sum(x.wire_bytes for x in sent))
    else:
        assert counts.wire == sum(x.wire_bytes for x in sent)
    if p > 1:
        assert counts.collectives == len(sent)
    else:
        assert counts.messages == counts.collectives == counts.wire == 0


@pytest.mark.parametrize("p", [2, 4, 8, 64])
def test_the_papers_forms(p):
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


@pytest.mark.parametrize(("algorithm", "codec"), PAIRS)
def test_a_codec_takes_its_time(algorithm, codec):
    """Twice as fast to encode and to decode is half as long, and nothing else."""
    if codec is None:
        return
    slow = cluster(4, codecs={codec: CodecSpeed(1e9, 2e9)})
    fast = cluster(4, codecs={codec: CodecSpeed(2e9, 4e9)})
    exchange = flat(slow, algorithm, 10_000, CODECS[codec])
    a, b = duration(slow, exchange, codec), duration(fast, exchange, codec)
    counts = exchange.between
    assert math.isclose(a.codec, counts.encoded / 1e9 + counts.decoded / 2e9)
    assert a._replace(codec=0) == b._replace(codec=0)
    assert math.isclose(a.codec, 2 * b.codec)
    assert a.computed == a.codec + a.reduction


def test_linear_codecs_under_psum():
    """PowerSGD of rank r: `r (rows + columns)` floats a matrix, in two rounds."""
    codec = codecs.power_sgd(2, jax.random.key(0)).of(((64, 32),))
    counts = FORMS["psum"](4, 64 * 32, codec)
    assert counts.collectives == 2
    assert counts.messages == 12
    assert counts.wire == 2 * 3 / 4 * 4 * 2 * (64 + 32)
    # All that is read is read once for both, as encoding is timed.
    assert counts.encoded == counts.decoded == 4 * 64 * 32


@pytest.mark.parametrize("algorithm", FORMS)
def test_power_sgd_goes_with_what_does_not_cut_leaves(algorithm):
    """As the collectives have it, which refuse the others."""
    codec = codecs.error_feedback(codecs.power_sgd(1, jax.random.key(0)))
    shapes, n = ((6, 8), (5,)), 53
    if timing.compatible(algorithm, codec):
        counts = FORMS[algorithm](4, n, codec.of(shapes))
        sent = declared(algorithm, codec, 4, n, shapes)
        assert math.isclose(counts.wire, sum(x.wire_bytes for x in sent))
    else:
        with pytest.raises(ValueError, match="`power_sgd` must "):
            declared(algorithm, codec, 4, n, shapes)
    assert not timing.compatible(algorithm, codec, levels=True)


def test_leaves_of_so_many_elements():
    """Matrices of 2^20, rows of 2^10, and a vector."""
    assert timing.square_leaves(3) == ((3,),)
    assert timing.square_leaves(2**21) == ((1024, 1024),) * 2
    found = timing.square_leaves(2**20 + 2**10 + 1)
    assert found == ((1024, 1024), (1, 1024), (1,))


HOSTS = Cluster(4, SLOW, devices=2, inner=Link(1e-5, 1e10), reduction=1 / GAMMA)


def test_between_hosts_a_share_of_the_vector():
    """Each of d devices moves a d-th; through one link, that is all of it once."""
    n = 4096
    found = hierarchical(HOSTS, "two_shot", n)
    assert found.between.wire == 2 * 3 / 4 * 4 * n
    assert found.inside.wire == 2 * 1 / 2 * 4 * n
    coded = hierarchical(HOSTS, "two_shot", n, codecs.int8())
    assert coded.inside == found.inside
    assert coded.between.wire < 0.26 * found.between.wire


def test_what_crosses_where_nobody_knows_of_hosts():
    """Two-shot: 6 of 7 devices are elsewhere. Ring: only the last of a host sends."""
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
        ("ring", 2, 2),  # the next is the one before
        ("ring", 4, 1.25),
        ("two_shot", 2, 2.5),
        ("two_shot", 3, 2.5),  # half of it four times, half as it is
        ("halving_doubling", 8, 2),
        ("halving_doubling", 5, 10 / 7),  # of 14 payloads 8 to and from the fifth
        ("tree", 4, 1),
        ("parameter_server", 4, 1),
    ],
)
def test_who_sends_and_receives_at_once_has_a_share_of_the_link(algorithm, p, factor):
    exchange = flat(cluster(p), algorithm, 2**10 * 105)
    some = cluster(p, shares=Shares(pair=1 / 2, shift=4 / 5, shuffle=1 / 4))
    found = duration(some, exchange).wire / duration(cluster(p), exchange).wire
    assert math.isclose(found, factor)


def test_leaves_one_by_one_cost_a_latency_each():
    """`(L-1) (2(p-1) alpha + S)` more than all in one."""
    sizes = [4096, 64, 1024]
    p = cluster(4)
    alone = duration(p, per_leaf(p, "psum", sizes)).total
    together = duration(p, flat(p, "psum", sum(sizes))).total
    assert math.isclose(alone - together, 2 * (6 * ALPHA + S))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Link(-1, 1e9), "`latency` must be seconds, 0 or more, got -1"),
        (lambda: Link(math.nan, 1e9), "`latency` must be seconds"),
        (lambda: Link("1", 1e9), "`latency` must be seconds, 0 or more, got '1'"),
        (lambda: Link(0, 0), "`bandwidth` must be bytes a second, above 0, got 0"),
        (lambda: Link(0, True), "`bandwidth` must be bytes a second"),
        (lambda: CodecSpeed(0), "`encode` must be bytes a second"),
        (lambda: CodecSpeed(1, -1), "`decode` must be bytes a second"),
        (lambda: Cluster(0, SLOW), "`hosts` must be a whole number of at least 1"),
        (lambda: Cluster(2.5, SLOW), "`hosts` must be a whole number"),
        (lambda: Cluster(2, SLOW, devices=0), "`devices` must be a whole number"),
        (lambda: Cluster(2, SLOW, devices=2), "`inner` must say what joins the"),
        (lambda: Cluster(2, SLOW, reduction=0), "`reduction` must be bytes a second"),
        (lambda: Shares(pair=0), "`pair` must be a share of the bandwidth, above 0"),
        (lambda: Shares(shift=1.1), "`shift` must be a share of the bandwidth"),
        (lambda: Shares(shuffle=True), "`shuffle` must be a share of the bandwidth"),
        (lambda: Cluster(2, SLOW, synchronisation=-1), "`synchronisation` must be"),
        (lambda: flat(HOSTS, "rings", 4), "`algorithm` must be one of psum, ring"),
        (
            lambda: duration(HOSTS, flat(HOSTS, "ring", 4), "int8"),
            "`codec` must be one of the cluster's, []; got 'int8'",
        ),
    ],
)
def test_bad_input(make, says):
    with pytest.raises(ValueError, match="^" + re.escape(says)):
        make()
