"""Tests the two levels of a sharded model: inside a host, and between hosts."""

import pytest

from pipejax.timing import (
    Cluster,
    Compute,
    Link,
    Workload,
    fsdp,
    plan,
    sharded,
    simulate,
)

CLUSTER = Cluster(4, Link(50e-6, 1e9), devices=8, inner=Link(1e-6, 100e9))


def test_traffic_inside_a_host_equals_numbers_by_hand():
    """Seven eighths of a gigabyte are sent three times."""
    found = fsdp(CLUSTER, 250_000_000)
    assert found.bytes == pytest.approx(3 * 7 / 8 * 1e9)
    assert found.seconds == pytest.approx(3e-6 + found.bytes / 100e9)
    assert fsdp(CLUSTER, 250_000_000, itemsize=2).bytes == found.bytes / 2
    assert fsdp(Cluster(4, Link(0.0, 1e9)), 10**6) == (0, 0)


@pytest.mark.parametrize("elements", [0, -100, 1.5, float("nan")])
def test_model_without_whole_elements_is_refused(elements):
    says = f"^`elements` must be a whole number of elements above 0; got {elements}"
    with pytest.raises(ValueError, match=says):
        fsdp(CLUSTER, elements)


@pytest.mark.parametrize("itemsize", [0, -4, float("nan"), "2"])
def test_elements_without_bytes_are_refused(itemsize):
    with pytest.raises(ValueError, match=r"^`itemsize` must be a finite number of byt"):
        fsdp(CLUSTER, 100, itemsize)


def test_shards_use_their_share_of_the_link_between_hosts():
    """The bytes on a host's link are those of a host that has one device."""
    one = Cluster(4, Link(50e-6, 1e9))
    compute = Compute.of(0.1)
    whole = plan(one, 80_000_000, compute)
    shards = plan(sharded(CLUSTER), 10_000_000, compute)
    assert [str(x.config) for x in shards] == [str(x.config) for x in whole]
    for ours, theirs in zip(shards, whole, strict=True):
        assert ours.exchange.wire == pytest.approx(theirs.exchange.wire, rel=1e-3)


def test_simulation_of_sharded_devices_agrees_with_the_plan():
    """A ring of all bits on the links of four devices with the same shards."""
    cluster = sharded(CLUSTER)
    (way,) = (
        x
        for x in plan(cluster, 10_000_000, Compute.of(0.1))
        if str(x.config) == "width 2, ring, uncompressed"
    )
    work = Workload(0.1, 10_000_000, "ring")
    simulated = simulate(cluster, work, width=2).step_time
    assert simulated == pytest.approx(way.step, rel=0.02)
