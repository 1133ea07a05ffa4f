"""Tests a cluster as JSON: written, read, and refused by the name of its fault."""

import dataclasses
import json
import math
import re

import pytest

from pipejax import timing
from pipejax.timing import Cluster, CodecSpeed, Link

from .known import KNOWN

INSTANT = dataclasses.replace(KNOWN, reduction=math.inf, codecs={"int8": CodecSpeed()})


@pytest.mark.parametrize(
    "cluster",
    [KNOWN, Cluster(2, Link(0, 1e9), devices=8, inner=Link(0, 1e11)), INSTANT],
)
def test_cluster_is_unchanged_by_json(cluster):
    """The JSON standard has no infinity."""
    text = json.dumps(timing.as_json(cluster), allow_nan=False)
    assert timing.from_json(json.loads(text)) == cluster


LINK = {"latency": 0, "bandwidth": 1e9}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ([], "`cluster` must be an object with the fields hosts, link, devices, "),
        ({}, "`cluster` must have hosts and link, got []."),
        ({"hosts": 2}, "`cluster` must have link, got ['hosts']."),
        ({"hosts": 2, "link": 1}, "`cluster.link` must be an object with the fields l"),
        (
            {"hosts": 2, "link": {**LINK, "speed": 1}},
            "`cluster.link` must have no fields but latency, bandwidth; got ['speed'].",
        ),
        (
            {"hosts": 2, "link": {**LINK, "bandwidth": "fast"}},
            "In `cluster.link`: `bandwidth` must be above 0 bytes per second; got",
        ),
        (
            {"hosts": 2, "link": {**LINK, "latency": None}},
            "In `cluster.link`: `latency` must be at least 0 seconds and finite; got"
            " None",
        ),
        ({"hosts": "2", "link": LINK}, "In `cluster`: `hosts` must be a whole number"),
        (
            {"hosts": 2, "link": LINK, "devices": 8},
            "In `cluster`: `inner` must be the link between the devices of a host",
        ),
        (
            {"hosts": 2, "link": LINK, "inner": {}},
            "`cluster.inner` must have latency and bandwidth, got [].",
        ),
        (
            {"hosts": 2, "link": LINK, "shares": {"pair": 2}},
            "In `cluster.shares`: `pair` must be a share of the bandwidth",
        ),
        (
            {"hosts": 2, "link": LINK, "codecs": ["int8"]},
            "`cluster.codecs` must be an object that maps codec names to speeds, got"
            " ['int",
        ),
        (
            {"hosts": 2, "link": LINK, "codecs": {"int8": {"encode": 0}}},
            "In `cluster.codecs.int8`: `encode` must be above 0 bytes per second; got"
            " 0",
        ),
    ],
)
def test_malformed_cluster_record_is_refused(record, says):
    with pytest.raises(ValueError, match="^" + re.escape(says)):
        timing.from_json(record)
