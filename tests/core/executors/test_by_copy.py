"""Tests the sum on CPU devices beside those of the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.executors import StepConfig, make_exchange
from pipejax._core.executors._by_copy import _one_cpu_a_process, reduction_mesh
from pipejax._core.message import Message, valid_in_step
from pipejax._core.step import Settings, replicated_step
from pipejax.collectives import psum

from .shards import sharded
from .test_run_exchange import config_on, other_mesh


def by_copy(config, cpus, message):
    """Exchanges a message on `cpus`."""
    return make_exchange(config, cpus)(None, message, {}, valid_in_step(1, 1))


@pytest.mark.parametrize("names", [("data", "model"), ("model", "data")])
def test_parts_on_several_devices_are_summed_once_by_copy(names):
    """Devices have copies of a part along an axis that does not share the data."""
    extents = {"data": 4, "model": 2}
    devices = np.array(jax.devices()).reshape([extents[name] for name in names])
    config = config_on(mesh := Mesh(devices, names))
    cpus = _one_cpu_a_process(mesh, "data")
    placed = jax.device_put(jnp.arange(8.0), config.data)
    total, _ = by_copy(config, cpus, Message({"w": placed}))
    np.testing.assert_array_equal(total.sum.gradients["w"], [12, 16])


def test_float16_sums_of_a_process_may_exceed_float16():
    """The largest float16 is 65,504, and one process has four devices."""
    config = config_on(pj.data_mesh(4))
    placed = jax.device_put(np.full(4, 30_000, np.float16), config.data)
    reduced, _ = by_copy(config, other_mesh(), Message({"w": placed}))
    total = reduced.sum.gradients["w"]
    assert total.dtype == jnp.float32
    assert total.tolist() == [120_000]
    assert bool(reduced.finite)


def test_message_of_a_host_is_copied_once_for_all_its_devices():
    """The largest float16 is 65,504, and four devices share the messages of two."""
    names = "host", "device"
    step = replicated_step(Settings(None, None, names, device_axis="device"))
    mesh = pj.data_mesh(4, axis_name=names, hosts=2)
    config = StepConfig(step, mesh, 2, psum(), donate=False)
    values = {"half": np.float16([32_768, 16_384]), "full": np.float32([1, 10])}
    placed = jax.device_put(values, NamedSharding(mesh, P("host")))
    cpus = Mesh(np.array(jax.devices()[7:]).reshape(1, 1), names)
    reduced, _ = by_copy(config, cpus, Message(placed))
    total = reduced.sum.gradients
    assert (total["half"].dtype, total["half"].tolist()) == (jnp.float32, [98_304])
    assert total["full"].tolist() == [22]
    assert bool(reduced.finite)
    assert reduced.squares.tolist() == [22**2, 98_304**2]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_array_without_elements_is_summed_by_copy(shape):
    config = config_on(pj.data_mesh(4))
    empty = jnp.zeros((4 * shape[0], shape[1]))
    reduced, _ = by_copy(config, other_mesh(), Message({"w": empty}))
    assert reduced.sum.gradients["w"].shape == shape


def test_bfloat16_is_summed_by_copy():
    rows = jnp.arange(8, dtype=jnp.bfloat16)
    config = config_on(pj.data_mesh(4))
    placed = jax.device_put(rows, config.data)
    reduced, _ = by_copy(config, other_mesh(), Message({"w": placed}))
    total = reduced.sum.gradients["w"]
    assert total.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(total, np.float32), [12, 16])


def test_mesh_of_cpus_is_its_own_reduction_mesh():
    mesh = pj.data_mesh(4)
    assert reduction_mesh(mesh, "data") is mesh


def test_first_cpu_stands_for_all_devices_of_a_process():
    """The first CPU device is used, with the axis names of the mesh."""
    mesh = Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("model", "data"))
    cpus = _one_cpu_a_process(mesh, "data")
    assert dict(cpus.shape) == {"model": 1, "data": 1}
    assert list(cpus.devices.flat) == jax.devices()[:1]


def test_missing_cpu_backend_is_refused(monkeypatch):
    def none(backend):
        raise RuntimeError("Unknown backend cpu")

    message = r"`executor='host'` must have JAX's CPU backend .* processes \[0\]"
    mesh = pj.data_mesh(4)
    monkeypatch.setattr(jax, "devices", none)
    with pytest.raises(ValueError, match=message):
        _one_cpu_a_process(mesh, "data")


def test_shards_are_summed_by_copy():
    """Each process puts its shards together, and lays the sum on them again."""
    config, message, _ = sharded()
    cpus = Mesh(np.array(jax.devices()[7:]).reshape(1, 1), ("data", "fsdp"))
    total, _ = by_copy(config, cpus, message)
    rows = np.asarray(message.gradients["w"]).reshape(2, 6, 5)
    gradient = total.sum.gradients["w"]
    np.testing.assert_array_equal(gradient, rows[0] + rows[1])
    assert gradient.sharding.spec == P("fsdp")
    assert gradient.sharding.device_set == set(config.mesh.devices.flat)
    assert bool(total.finite)


def test_message_of_numpy_arrays_is_summed_by_copy():
    """A state that Flax has read from bytes has such arrays."""
    config = config_on(pj.data_mesh(4))
    rows = np.arange(8, dtype=np.float32)
    reduced, _ = by_copy(config, other_mesh(), Message({"w": rows}))
    np.testing.assert_array_equal(reduced.sum.gradients["w"], [12, 16])
