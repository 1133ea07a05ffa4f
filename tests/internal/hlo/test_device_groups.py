"""Tests which axes of a mesh the collectives of a program run over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._internal.hlo._device_groups import MeshAxes, by_slice
from pipejax._internal.hlo._parse import parse
from pipejax.overlap import inspect

from ...overlap.test_topology import TPU

NAMES = ("a", "b", "c")
X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def mesh_of(devices):
    types = (AxisType.Auto,) * 3
    return Mesh(np.array(devices).reshape(2, 2, 2), NAMES, axis_types=types)


def report(mesh, local):
    f = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return inspect(jax.jit(f), X, mesh=mesh)


@pytest.mark.parametrize("axes", [("a",), ("b",), ("c",), ("a", "c"), NAMES])
@pytest.mark.parametrize("order", [range(8), [5, 2, 7, 0, 3, 6, 1, 4]])
def test_axes_of_a_group_are_found_for_any_device_order(axes, order):
    mesh = mesh_of([jax.devices()[i] for i in order])
    (one,) = report(mesh, lambda x: lax.psum(x, axes)).collectives
    assert one.axes == axes


def test_shares_are_reported_by_axis():
    """On CPUs collectives are synchronous, so that nothing runs during them."""
    mesh = mesh_of(jax.devices())
    found = report(mesh, lambda x: lax.psum(lax.psum(x @ x, "a") @ x, ("b", "c")))
    assert found.covered_by == {("a",): 0.0, ("b", "c"): 0.0}
    assert found.share_by == {("a",): 0.0, ("b", "c"): 0.0}
    assert "over a: under at least one 0.00, weighted by bytes 0.00" in str(found)
    assert "over b+c: under at least one 0.00" in str(found)
    written = found.to_dict()
    assert written["covered_by"] == {"a": 0.0, "b+c": 0.0}
    assert [x["axes"] for x in written["collectives"]] == [("a",), ("b", "c")]


def test_flops_under_collectives_are_counted_by_axis():
    """The first of two matmuls runs during both collectives, the second during one."""
    text = """HloModule step, is_scheduled=true, replica_count=4
ENTRY %main (p: f32[8,8], x: f32[100]) -> f32[100] {
  %p = f32[8,8] parameter(0)
  %x = f32[100] parameter(1)
  %near = f32[100] all-reduce-start(%x), replica_groups={{0,1},{2,3}}
  %far = f32[100] all-reduce-start(%x), replica_groups={{0,2},{1,3}}
  %one = f32[8,8] dot(%p, %p), lhs_contracting_dims={1}
  %here = f32[100] all-reduce-done(%near)
  %two = f32[8,8] dot(%p, %p), lhs_contracting_dims={1}
  ROOT %there = f32[100] all-reduce-done(%far)
}"""
    mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
    found = inspect(text, mesh=mesh)
    assert found.covered == 1
    assert found.covered_by == {("fsdp",): 0.5, ("host",): 1.0}
    assert found.share_by == {("fsdp",): 0.5, ("host",): 1.0}
    unknown = inspect(text)
    assert [x.axes for x in unknown.collectives] == [None, None]
    assert (unknown.covered_by, unknown.share_by) == ({}, {})
    assert "  ?  " in str(unknown)


def test_mesh_of_another_size_is_refused():
    module = parse(
        "HloModule m, replica_count=4\nENTRY %e {\n  ROOT %c = f32[] constant(0)\n}"
    )
    with pytest.raises(ValueError, match="`devices` must be the 4 devices"):
        MeshAxes(pj.data_mesh(8), module)
    assert by_slice(list(range(4)), module) == [[0, 1, 2, 3]]


@TPU
def test_axes_between_slices_are_found():
    devices = pj.overlap.topology("tpu:2xv5e:2x2")
    mesh = pj.data_mesh(devices=devices, axis_name=("slice", "chip"))
    assert dict(mesh.shape) == {"slice": 2, "chip": 4}

    def local(x):
        return lax.psum(lax.psum(x, "slice"), "chip")

    f = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    found = inspect(jax.jit(f), X, mesh=mesh).collectives
    assert {x.axes for x in found} == {("slice",), ("chip",)}
    placed = X.update(sharding=NamedSharding(mesh, P()))
    assert inspect(jax.jit(f), placed).collectives == found
