"""Tests the exchange as its own program, on the mesh or on CPU devices beside it."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import pipejax as pj
from pipejax import codecs
from pipejax._core.executors import StepConfig, make_exchange
from pipejax._core.executors._run_exchange import exchange_on_mesh
from pipejax._core.message import Message, valid_in_step
from pipejax._core.step import Settings, replicated_step
from pipejax.collectives import psum

from ...helpers import assert_bits_equal
from .shards import sharded

REAL = valid_in_step(1, 1)


def config_on(mesh):
    """Returns the part of a configuration that a reduction reads."""
    step = replicated_step(Settings(None, None, "data"))
    return StepConfig(step, mesh, 2, psum(), donate=False)


def other_mesh():
    """Returns a mesh of one CPU device other than the first four."""
    return Mesh(np.array(jax.devices()[7:]), ("data",))


@pytest.mark.parametrize("beside", [False, True])
def test_sum_over_devices_is_placed_on_the_mesh(beside):
    """Device i sends digit i of the sum."""
    config = config_on(mesh := pj.data_mesh(4))
    exchange = make_exchange(config, other_mesh() if beside else mesh)
    placed = jax.device_put(np.float32([1, 10, 100, 1000]), config.data)
    reduced, states = exchange(None, Message({"w": placed}), {}, REAL)
    total = reduced.sum.gradients["w"]
    assert total.tolist() == [1111]
    assert total.sharding.device_set == set(mesh.devices.flat)
    assert (bool(reduced.valid), bool(reduced.finite)) == (True, True)
    assert states == {}


def test_sum_with_infinity_is_marked():
    config = config_on(pj.data_mesh(4))
    placed = jax.device_put(np.float32([1, np.inf, 2, 3]), config.data)
    reduced, _ = exchange_on_mesh(config)(None, Message({"w": placed}), {}, REAL)
    assert (bool(reduced.valid), bool(reduced.finite)) == (True, False)


def test_reduction_returns_after_the_sum_is_ready(monkeypatch):
    """A failure is then raised by the reduction, not where its result is read."""
    config = config_on(pj.data_mesh(2))
    placed = jax.device_put(np.float32([1, 10]), config.data)
    wait, waited = jax.block_until_ready, []

    def waiting(value):
        waited.append(value)
        return wait(value)

    monkeypatch.setattr(jax, "block_until_ready", waiting)
    reduced, _ = exchange_on_mesh(config)(None, Message({"w": placed}), {}, REAL)
    ((whole, _),) = waited
    assert whole.sum.gradients["w"] is reduced.sum.gradients["w"]


def test_message_of_an_empty_queue_keeps_the_residuals():
    """A queue that is not full sends zeros, as all processes must send something."""
    config, message, states = sharded(codecs.int8(8))
    exchange = exchange_on_mesh(config)
    _, after = exchange(None, message, states, REAL)
    reduced, kept = exchange(None, message, states, valid_in_step(0, 1))
    assert (bool(reduced.valid), bool(reduced.finite)) == (False, True)
    assert_bits_equal(*map(jax.device_get, (kept, states)))
    assert any(map(np.any, jax.tree.leaves(jax.device_get(after))))
