"""Tests the groups of devices in programs whose collectives are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax.overlap import collective_groups

from ...overlap import GROUPS, dots, program
from ...overlap.independent import lines_of
from ...overlap.test_topology import GPU, TPU

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def compiled(mesh, local):
    f = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(f).lower(X).compile()


def summed(mesh, axes):
    return compiled(mesh, lambda x: lax.psum(x, axes))


def mesh_of(devices, *shape):
    names = tuple("abc"[: len(shape)])
    types = (AxisType.Auto,) * len(shape)
    return Mesh(np.array(devices).reshape(shape), names, axis_types=types)


@pytest.mark.parametrize("axes", ["a", "b", "c", ("a", "c"), ("a", "b", "c")])
@pytest.mark.parametrize("order", [range(8), [5, 2, 7, 0, 3, 6, 1, 4]])
def test_groups_follow_the_axes_of_a_mesh_in_any_order(axes, order):
    mesh = mesh_of([jax.devices()[i] for i in order], 2, 2, 2)
    (one,) = collective_groups(summed(mesh, axes), mesh)
    assert one.kind == "all-reduce"
    assert lines_of(mesh)[frozenset(one.groups)] == tuple(axes)
    assert "psum" in one.op_name
    assert "all-reduce(" in one.line
    assert not one.crosses_processes


def test_groups_are_found_in_text_with_a_list_of_devices():
    mesh = mesh_of(jax.devices(), 2, 4)
    both = summed(mesh, "b")
    expected = collective_groups(both, mesh)
    assert collective_groups(both.as_text(), list(mesh.devices.flat)) == expected


def test_groups_are_found_in_loops_and_branches():
    mesh = mesh_of(jax.devices(), 8)

    def local(x):
        x = lax.fori_loop(0, 3, lambda i, x: lax.psum(x, "a"), x)
        return lax.cond(x[0, 0] > 0, lambda x: lax.pmax(x, "a"), lambda x: x, x)

    text = compiled(mesh, local).as_text().replace("is_scheduled=true, ", "")
    found = collective_groups(text, mesh)
    assert [one.kind for one in found] == ["all-reduce", "all-reduce"]
    assert {one.groups for one in found} == {(frozenset(jax.devices()),)}


@GPU
@pytest.mark.parametrize(("axes", "crosses"), [("a", True), ("b", False)])
def test_groups_across_hosts_are_marked(axes, crosses):
    mesh = mesh_of(pj.overlap.topology("h100:1x2x4"), 2, 4)
    (one,) = collective_groups(summed(mesh, axes), mesh)
    assert one.crosses_processes == crosses


@TPU
@pytest.mark.parametrize(
    ("axes", "kinds"),
    [
        ("a", {"all-reduce"}),
        ("b", {"all-reduce"}),
        # Each slice has its own all-reduce, and all slices together have one.
        (("a", "b"), {"all-reduce", "all-gather"}),
    ],
)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 3, 1, 2]])
def test_groups_across_slices_are_marked(axes, kinds, order):
    """If each slice has an order of its own, XLA has to list the groups."""
    devices = pj.overlap.topology("tpu:2xv5e:2x2")
    mesh = mesh_of([*devices[:4], *(devices[4 + i] for i in order)], 2, 4)
    found = collective_groups(summed(mesh, axes), mesh)
    known = lines_of(mesh)
    assert {one.kind for one in found} <= kinds
    along = [known[frozenset(one.groups)] for one in found]
    assert {axis for one in along for axis in one} == set(axes)
    assert [one.crosses_processes for one in found] == ["a" in one for one in along]


def test_devices_of_another_mesh_are_refused():
    mesh = mesh_of(jax.devices()[:4], 4)
    with pytest.raises(
        ValueError, match=r"`devices` must be the 4 devices that .*; got 8 devices"
    ):
        collective_groups(summed(mesh, "a"), jax.devices())


def test_slices_of_other_devices_are_refused():
    target = 'frontend_attributes={_xla_megascale_target="{1,2}x{0:7}",'
    target += '_xla_megascale_transfer_type="ALL_REDUCE"}'
    text = program(
        f"%k = token[] after-all()\n%s = (f32[100], token[]) send(%x, %k), {target}\n"
        f"{dots('a')}\nROOT %r = f32[100] all-reduce(%x), {GROUPS}"
    )
    with pytest.raises(ValueError, match=r"`devices` lacks the ids \[100000, .*\n%s ="):
        collective_groups(text, jax.devices())
