"""Tests the reduction of shards, place by place, against the one on the whole mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs
from pipejax._core.executors import StepConfig
from pipejax._core.executors._by_shard import (
    _by_shard,
    exchange_by_shard,
    groups_in_processes,
)
from pipejax._core.executors._run_exchange import exchange_on_mesh
from pipejax._core.message import Message, valid_in_step
from pipejax._core.step import Settings, replicated_step
from pipejax._internal.shards import Shards
from pipejax.collectives import psum

from ...helpers import assert_bits_equal
from .shards import sharded

REAL = valid_in_step(1, 1)


@pytest.mark.parametrize("codec", [None, codecs.int8(8)])
def test_reduction_by_place_equals_the_sum_on_the_mesh(codec):
    config, message, states = sharded(codec)
    by_shard, on_mesh = exchange_by_shard(config), exchange_on_mesh(config)
    for _ in range(2):  # the second time with the residuals of the first
        found, states_found = by_shard(None, message, states, REAL)
        wanted, states = on_mesh(None, message, states, REAL)
        assert_bits_equal(*(jax.device_get(x) for x in (found, wanted)))
        assert_bits_equal(*(jax.device_get(x) for x in (states_found, states)))
        for leaf, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            assert leaf.sharding.is_equivalent_to(other.sharding, leaf.ndim)
    gradient = found.sum.gradients["w"]
    assert gradient.sharding.spec == P("fsdp")
    if codec is None:
        rows = np.asarray(message.gradients["w"]).reshape(2, 6, 5)
        np.testing.assert_array_equal(gradient, rows[0] + rows[1])


def test_message_of_a_host_counts_for_its_devices_at_every_place():
    names = "host", "device"
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), (*names, "fsdp"))
    step = replicated_step(Settings(None, None, names, device_axis="device"))
    config = StepConfig(step, mesh, 2, psum(), donate=False)
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    split = NamedSharding(mesh, P(("host", "fsdp")))
    placed = {"w": jax.device_put(rows.reshape(-1), split)}
    message = Message(placed, shards=Shards(params=(P("fsdp"),)))
    for exchange in exchange_by_shard(config), exchange_on_mesh(config):
        found, _ = exchange(None, message, {}, REAL)
        total = found.sum.gradients["w"]
        np.testing.assert_array_equal(total, 2 * (rows[0] + rows[1]))
        assert total.sharding.spec == P("fsdp")


def test_infinity_at_one_place_keeps_the_states_of_all():
    config, message, states = sharded(codecs.int8(8), bad=True)
    found, after = exchange_by_shard(config)(None, message, states, REAL)
    assert not bool(found.finite)
    assert after is states


@pytest.mark.parametrize("names", [("data", "fsdp"), ("fsdp", "data")])
def test_places_hold_one_device_of_each_group(names):
    extents = {"data": 4, "fsdp": 2}
    devices = np.arange(8).reshape([extents[name] for name in names])
    mesh = Mesh(np.array(jax.devices())[devices], names)
    first, second = _by_shard(mesh, "data")
    along = devices if names[0] == "data" else devices.T
    for place, column in zip((first, second), along.T, strict=True):
        assert place.axis_names == ("data",)
        assert [x.id for x in place.devices] == column.tolist()


def test_single_process_does_not_count_as_groups_in_processes():
    """All devices of this process, which has no others to wait for."""
    assert not groups_in_processes(pj.data_mesh(8), "data")
    inner = pj.data_mesh(8, axis_name=("data", "fsdp"), hosts=2)
    assert not groups_in_processes(inner, "data")
