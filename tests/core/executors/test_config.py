"""Tests how data and arrays are placed on meshes of several shapes."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

import pipejax as pj
from pipejax._core.executors import StepConfig
from pipejax._core.step import Settings, replicated_step
from pipejax.collectives import AllReduce, Stages, psum

HOSTS = ("host", "device")


def replicated_model():
    """Returns a mesh with four shares of the data, each on two devices."""
    devices = np.array(jax.devices()).reshape(4, 2)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def config_on(mesh, axis_name="data", all_reduce=None):
    all_reduce = all_reduce or psum()
    step = replicated_step(Settings(None, None, axis_name))
    return StepConfig(step, mesh, 2, all_reduce, donate=False)


MESHES = {
    "one axis": (lambda: pj.data_mesh(4), "data"),
    "two axes": (lambda: pj.data_mesh(4, axis_name=HOSTS, hosts=2), HOSTS),
    "an axis beside": (replicated_model, "data"),
}


class Numbered(AllReduce):
    """An all-reduce whose state is each device's place along the axes of the data."""

    def __call__(self, layout, axis_name):
        del layout
        return Stages((), (lambda prefix: {"place": lax.axis_index(axis_name)[None]},))


@pytest.mark.parametrize("name", MESHES)
def test_four_devices_share_the_data(name):
    """Device i has the i-th share of a batch."""
    make, axis_name = MESHES[name]
    config = config_on(mesh := make(), axis_name, Numbered())
    assert config.devices == 4
    batch = jax.device_put(np.arange(8), config.data)
    shares = {shard.device: shard.data.tolist() for shard in batch.addressable_shards}
    rows = mesh.devices.reshape(4, -1)
    assert shares == {
        device: [2 * i, 2 * i + 1] for i, row in enumerate(rows) for device in row
    }


def test_config_at_another_mesh_counts_its_devices():
    """A configuration for another mesh does not use values found for the first."""
    config = config_on(pj.data_mesh(4))
    assert (config.devices, config.data.mesh) == (4, config.mesh)
    there = config.at(other := pj.data_mesh(2))
    assert (there.devices, there.data.mesh) == (2, other)
    assert (there.step, there.width) == (config.step, 2)
    assert config.mesh.size == 4


class Fitted(Numbered):
    """An all-reduce that becomes another one on a mesh."""

    def on(self, mesh):
        return psum(combine_threshold_bytes=mesh.size)


def test_all_reduce_is_adapted_to_the_mesh():
    config = config_on(pj.data_mesh(4), all_reduce=Fitted())
    assert config.sums_by == psum(combine_threshold_bytes=4)
    assert config.at(pj.data_mesh(2)).sums_by == psum(combine_threshold_bytes=2)
