"""Reads how the arrays that a user gives are split over inner axes, and checks it."""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._internal.mesh import AxisName, axes, explicit_axes, inner_axes

from ._specs import axes_along, over


def inner_specs(
    name: str, tree: Any, mesh: Mesh, axis_name: AxisName, *, gathers: bool = False
) -> tuple[P, ...]:
    """Returns the specs by which the leaves of `tree` are split over inner axes.

    A leaf that has no sharding, or lies on a single device, is split over no axis. With
    `gathers`, leaves may also be split over the axes of the data, which their specs
    leave out. `name` is the argument, for errors.
    """
    inner = inner_axes(mesh, axis_name)
    # The results of a jitted function do not name axes of size 1, unless a type does.
    kept = {n for n in inner if mesh.shape[n] > 1} | {*explicit_axes(mesh, axis_name)}
    leaves = jax.tree_util.tree_leaves_with_path(tree)

    def spec(path: Any, leaf: Any) -> P:
        sharding = getattr(leaf, "sharding", None)
        traced = isinstance(leaf, jax.core.Tracer)
        if traced or sharding is None or sharding.is_fully_replicated:
            return P()
        if gathers and isinstance(sharding, NamedSharding):
            others = {*sharding.mesh.axis_names} - {*axes(axis_name)}
            sharding = NamedSharding(sharding.mesh, over(sharding.spec, others))
            if sharding.is_fully_replicated:
                return P()
        leaf_name = f"{name}{jax.tree_util.keystr(path)}"
        _check_spec(leaf_name, sharding, mesh, inner, axis_name)
        _check_divides(leaf_name, leaf.shape, sharding.spec, mesh)
        return over(sharding.spec, kept)

    return tuple(spec(path, leaf) for path, leaf in leaves)


def _check_spec(
    name: str, sharding: Any, mesh: Mesh, inner: tuple[str, ...], axis_name: AxisName
) -> None:
    if not inner:
        raise ValueError(
            f"`{name}` must be replicated on a mesh whose axes all share the data, got"
            f" one that is sharded by {sharding}. To shard the model inside groups of"
            " devices, give the mesh an axis more, such as"
            " pj.data_mesh(axis_name=('host', 'fsdp')), and average over the first:"
            " axis_name='host'. To replicate it, pass"
            " jax.device_put(leaf, NamedSharding(mesh, PartitionSpec())). Pass one"
            " replica of what `pmap` returned: flax.jax_utils.unreplicate(tree)."
        )
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"`{name}` must have a jax.sharding.NamedSharding, which names the axes"
            f" over which it is sharded; got {sharding}. Place it with"
            f" jax.device_put(leaf, NamedSharding(mesh, PartitionSpec({inner[0]!r})))."
        )
    used = {axis for entry in sharding.spec for axis in axes_along(entry)}
    if averaged := sorted(used & set(axes(axis_name))):
        raise ValueError(
            f"`{name}` must not be sharded over {averaged[0]!r}, over which gradients"
            f" are averaged; got {sharding.spec}. Shard it over inner axes of the mesh:"
            f" {', '.join(map(repr, inner))}."
        )
    given = {axis: size for axis, size in sharding.mesh.shape.items() if axis in used}
    if given != {axis: mesh.shape.get(axis) for axis in used}:
        raise ValueError(
            f"`{name}` must be sharded over the mesh of the train step, {mesh.shape};"
            f" got a sharding over {sharding.mesh.shape}. Make its NamedSharding with"
            " the mesh that make_train_step was given."
        )


def _check_divides(name: str, shape: tuple[int, ...], spec: P, mesh: Mesh) -> None:
    for axis, entry in enumerate(spec):
        parts = math.prod(mesh.shape[x] for x in axes_along(entry))
        if shape[axis] % parts:
            raise ValueError(
                f"`{name}` must divide among the devices along {entry!r}: got axis"
                f" {axis} of shape {shape} for {parts} devices. Pad it, or shard"
                " another axis."
            )
