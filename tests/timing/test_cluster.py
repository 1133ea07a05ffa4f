"""Tests a cluster: the speeds of its codecs, and the numbers that it refuses."""

import json
import math
import re

import numpy as np
import pytest

from pipejax.timing import Cluster, CodecSpeed, Compute, Link, Shares, as_json

LINK = Link(1e-4, 62.5e6)


def test_numbers_of_numpy_are_numbers():
    """They become numbers of Python, which JSON has."""
    link = Link(np.float32(0.5), np.int32(2**30))
    found = Cluster(
        np.int64(2), link, shares=Shares(np.float16(0.5)), reduction=np.float32(2)
    )
    assert found == Cluster(2, Link(0.5, 2**30), shares=Shares(0.5), reduction=2)
    assert json.loads(json.dumps(as_json(found)))["link"]["latency"] == 0.5
    assert Compute(np.float32(0.5), 1) == Compute(0.5, 1)
    assert CodecSpeed(np.float32(2), np.inf) == CodecSpeed(2)


def test_omitted_speeds_cost_no_time():
    cluster = Cluster(2, LINK)
    assert cluster.reduction == math.inf
    assert cluster.synchronisation == 0
    assert cluster.shares == Shares(1, 1, 1)
    assert (cluster.devices, cluster.inner) == (1, None)


def test_codec_speed_is_found_by_its_name():
    cluster = Cluster(2, LINK, codecs={"int8": CodecSpeed(1e9, 2e9)})
    assert cluster.codec("int8") == CodecSpeed(encode=1e9, decode=2e9)
    assert cluster.codec(None) == CodecSpeed(math.inf, math.inf)
    says = "`codec` must be one of the cluster's codecs, ['int8']; got 'sign'"
    with pytest.raises(ValueError, match="^" + re.escape(says)):
        cluster.codec("sign")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: Link(-1, 1e9),
            "`latency` must be at least 0 seconds and finite; got -1",
        ),
        (
            lambda: Link(math.nan, 1e9),
            "`latency` must be at least 0 seconds and finite",
        ),
        (
            lambda: Link("1", 1e9),
            "`latency` must be at least 0 seconds and finite; got '1'",
        ),
        (lambda: Link(10**400, 1), "`latency` must be at least 0 seconds and finite"),
        (lambda: Link(0, 10**400), "`bandwidth` must be above 0 bytes per second"),
        (lambda: Cluster(10**9 + 1, LINK), "`hosts` must be a whole number of at leas"),
        (lambda: Link(0, 0), "`bandwidth` must be above 0 bytes per second; got 0"),
        (lambda: Link(0, True), "`bandwidth` must be above 0 bytes per second"),
        (lambda: CodecSpeed(0), "`encode` must be above 0 bytes per second"),
        (lambda: CodecSpeed(1, -1), "`decode` must be above 0 bytes per second"),
        (lambda: Cluster(0, LINK), "`hosts` must be a whole number of at least 1"),
        (lambda: Cluster(2.5, LINK), "`hosts` must be a whole number"),
        (lambda: Cluster(2, LINK, devices=0), "`devices` must be a whole number"),
        (lambda: Cluster(2, LINK, devices=2), "`inner` must be the link between the"),
        (
            lambda: Cluster(2, LINK, reduction=0),
            "`reduction` must be above 0 bytes per second",
        ),
        (lambda: Shares(pair=0), "`pair` must be a share of the bandwidth, above 0"),
        (lambda: Shares(shift=1.1), "`shift` must be a share of the bandwidth"),
        (lambda: Shares(shuffle=True), "`shuffle` must be a share of the bandwidth"),
        (lambda: Cluster(2, LINK, synchronisation=-1), "`synchronisation` must be"),
    ],
)
def test_bad_numbers_of_a_cluster_are_refused(make, says):
    with pytest.raises(ValueError, match="^" + re.escape(says)):
        make()
