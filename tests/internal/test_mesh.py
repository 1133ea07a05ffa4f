"""Tests the devices, axes and axis types of meshes."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import pipejax as pj
from pipejax._internal.mesh import (
    _by_host,
    auto_mesh,
    explicit_axes,
    is_attached,
    without_mesh,
)

from ..helpers import assert_bits_equal, batches, init_params, loss_fn
from ..overlap.test_topology import TPU

BOTH = ("host", "device")


@pytest.mark.parametrize("count", [None, 1, 3, 8, np.int64(2)])
def test_data_mesh_has_the_first_devices(count):
    mesh = pj.data_mesh(count)
    assert mesh.devices.tolist() == jax.devices()[:count]
    assert mesh.axis_names == ("data",)
    assert mesh.axis_types == (AxisType.Auto,)


@TPU
@pytest.mark.parametrize(("axis_name", "shape"), [("data", (8,)), (BOTH, (2, 4))])
def test_data_mesh_keeps_the_order_of_tpu_slices(axis_name, shape):
    devices = pj.overlap.topology("tpu:2xv5e:2x2")
    mesh = pj.data_mesh(devices=devices, axis_name=axis_name)
    assert mesh.devices.shape == shape
    assert list(mesh.devices.flat) == devices


@TPU
def test_rows_of_a_mesh_have_the_devices_of_one_process():
    """Hosts of a v5e slice of 4 x 4 chips have 2 x 2 chips each."""
    devices = pj.overlap.topology("tpu:v5e:4x4")
    mesh = pj.data_mesh(devices=devices[::-1], axis_name=BOTH)
    assert mesh.devices.shape == (4, 4)
    rows = [{device.process_index for device in row} for row in mesh.devices]
    assert rows == [{0}, {1}, {2}, {3}]


def test_data_mesh_accepts_another_axis_name():
    assert dict(pj.data_mesh(2, axis_name="rows").shape) == {"rows": 2}


@pytest.mark.parametrize("count", [0, -1, 9, 2.0, 1.5, True, "2"])
def test_bad_number_of_devices_is_refused(count):
    message = (
        rf"`num_devices` must be an integer between 1 and 8, the number of devices; got"
        rf" {count!r}. On CPU, call `jax.config.update\('jax_num_cpu_devices', n\)`"
    )
    with pytest.raises(ValueError, match=message):
        pj.data_mesh(count)


def test_set_mesh_is_suspended_by_without_mesh():
    """Inside, arrays on other meshes can be used; the set mesh returns at the end."""
    own = jax.sharding.NamedSharding(pj.data_mesh(4), jax.sharding.PartitionSpec())
    leaf = jax.device_put(np.arange(3), own)
    explicit = jax.make_mesh((2,), ("x",), (AxisType.Explicit,))
    with jax.set_mesh(explicit):
        with pytest.raises(ValueError, match="context mesh"):
            jnp.sin(leaf)
        with without_mesh():
            assert jnp.sin(leaf).sharding == own
        assert jax.sharding.get_abstract_mesh() == explicit.abstract_mesh


@pytest.mark.parametrize(
    "mesh",
    [
        jax.make_mesh((4,), ("data",)),
        Mesh(np.array(jax.devices()[4:]), ("data",)),
        Mesh(np.array(jax.devices()[:4])[::-1], ("data",)),
    ],
    ids=["explicit", "other devices", "reversed"],
)
def test_step_has_the_same_bits_on_any_mesh_of_four(mesh):
    """`jax.make_mesh` makes Explicit axes, and the user orders the devices."""

    def run(mesh):
        train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, width=2)
        state = train.init(init_params())
        for batch in batches(3):
            state, _ = train.step(state, batch)
        return train.drain(state)[0].params

    assert_bits_equal(run(mesh), run(pj.data_mesh(4)))


def test_mesh_of_hosts_has_two_axes():
    mesh = pj.data_mesh(6, axis_name=("host", "device"), hosts=2)
    assert dict(mesh.shape) == {"host": 2, "device": 3}
    # All devices belong to this process.
    one = pj.data_mesh(4, axis_name=("host", "device"))
    assert dict(one.shape) == {"host": 1, "device": 4}


@pytest.mark.parametrize("hosts", [0, 3])
def test_hosts_must_divide_the_devices(hosts):
    message = rf"`hosts` must divide the 4 devices into equal parts, got {hosts}"
    with pytest.raises(ValueError, match=message):
        pj.data_mesh(4, axis_name=("host", "device"), hosts=hosts)


@pytest.mark.parametrize(
    ("processes", "hosts", "said"),
    [
        ([0, 1, 2, 3], None, 1),
        ([0, 0, 1, 1], None, 0),
        ([0, 1, 2, 3], 2, 0),
        ([0], 1, 0),
    ],
)
def test_hosts_of_one_device_are_logged(processes, hosts, said, caplog):
    """A host with a process for each of its GPUs would be many hosts."""
    devices = [types.SimpleNamespace(process_index=i) for i in processes]
    _by_host(devices, hosts)
    found = [x for x in caplog.records if "counts as a host with one" in x.message]
    assert len(found) == said


def test_processes_with_unequal_devices_need_the_number_of_hosts():
    devices = [types.SimpleNamespace(process_index=i) for i in (0, 0, 1, 1, 1, 1)]
    with pytest.raises(
        ValueError, match=r"^`hosts` must be given where .* \{0: 2, 1: 4"
    ):
        _by_host(devices, None)
    assert _by_host(devices, 3) == (3, 2)
    assert _by_host(devices[:4], None) == (2, 2)


@pytest.mark.parametrize("axis_name", ["data", ("a", "b", "c")])
def test_hosts_without_two_axes_are_refused(axis_name):
    with pytest.raises(ValueError, match=r"`axis_name` must be one name, or two"):
        pj.data_mesh(4, axis_name=axis_name, hosts=2)


def test_train_step_over_a_missing_axis_is_refused():
    mesh = pj.data_mesh(4, axis_name=("host", "device"), hosts=2)
    with pytest.raises(ValueError, match=r"`mesh` must have the axis \('host', 'x'\)"):
        pj.make_train_step(
            lambda w, x: w, optax.sgd(0.1), mesh=mesh, axis_name=("host", "x")
        )


def test_described_devices_are_not_attached():
    assert is_attached(pj.data_mesh(2))
    pytest.importorskip("libtpu")
    assert not is_attached(pj.data_mesh(devices=pj.overlap.topology("tpu:v5e:2x4")))


def test_explicit_axes_inside_groups_are_found():
    types = (AxisType.Explicit, AxisType.Auto, AxisType.Explicit)
    names = "host", "fsdp", "tp"
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=types)
    assert explicit_axes(mesh, "host") == ("tp",)
    assert explicit_axes(mesh, ("host", "tp")) == ()
    auto = auto_mesh(mesh)
    assert auto.axis_types == (AxisType.Auto,) * 3
    assert (auto.shape, auto.devices.tolist()) == (mesh.shape, mesh.devices.tolist())
