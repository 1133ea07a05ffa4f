"""How the devices of a group shard the model that they hold together.

A mesh may have more axes than those over which gradients are averaged. The devices at
one place along the data's axes are then a group, which holds one copy of the model. All
other axes are inner axes. Inside a group, XLA splits arrays and compute as in any
program under `jax.jit`, and adds the collectives for it.

A step runs inside `jax.shard_map` over the data's axes alone, where arrays have the
shapes that they have in a group. The partition specs of this module name inner axes
only.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .mesh import AxisName, axes, inner_axes


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Shards:
    """Partition specs of the arrays of a state, over inner axes.

    It is a pytree without leaves, so that a traced function can be given it.

    Attributes:
      params: A spec for each leaf of the parameters.
      model_state: A spec for each leaf of the model state.
      changes: A spec for each floating leaf of the model state.
      cuts: With a sharded optimizer, for each leaf of the parameters the axis along
        which it is split over the axes of the data, or `None` if it is not. Empty
        without a sharded optimizer.
      inner: Names of the inner axes.
    """

    params: tuple[P, ...] = ()
    model_state: tuple[P, ...] = ()
    changes: tuple[P, ...] = ()
    cuts: tuple[int | None, ...] = ()
    inner: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Returns whether there are specs, as on every mesh with inner axes."""
        return bool(self.params)


UNSHARDED = Shards()


def inner_specs(
    name: str, tree: Any, mesh: Mesh, axis_name: AxisName, *, gathers: bool = False
) -> tuple[P, ...]:
    """Returns the specs by which the leaves of `tree` are split over inner axes.

    Args:
      name: Name of the argument, for the error message.
      tree: Arrays or `jax.ShapeDtypeStruct`s. A leaf that has no sharding, or lies on a
        single device, is split over no axis.
      mesh: The mesh of the train step.
      axis_name: Axis or axes of the data.
      gathers: Whether leaves may be split over the axes of the data alone. They then
        count as split over no axis.

    Raises:
      ValueError: If a leaf is split over an axis of the data, or over anything that is
        no inner axis of `mesh`, or if it does not divide.
    """
    inner = inner_axes(mesh, axis_name)
    leaves = jax.tree_util.tree_leaves_with_path(tree)

    def spec(path: Any, leaf: Any) -> P:
        sharding = getattr(leaf, "sharding", None)
        traced = isinstance(leaf, jax.core.Tracer)
        if traced or sharding is None or sharding.is_fully_replicated:
            return P()
        if gathers and _is_over_data(sharding, axis_name):
            return P()
        leaf_name = f"{name}{jax.tree_util.keystr(path)}"
        _check_spec(leaf_name, sharding, mesh, inner, axis_name)
        _check_divides(leaf_name, leaf.shape, sharding.spec, mesh)
        return _above_one(sharding.spec, mesh)

    return tuple(spec(path, leaf) for path, leaf in leaves)


def _is_over_data(sharding: Any, axis_name: AxisName) -> bool:
    """Returns whether an array is split over axes of the data and no others."""
    if not isinstance(sharding, NamedSharding):
        return False
    used = {axis for entry in sharding.spec for axis in _names(entry)}
    return used <= set(axes(axis_name))


def _check_spec(
    name: str, sharding: Any, mesh: Mesh, inner: tuple[str, ...], axis_name: AxisName
) -> None:
    """Raises a `ValueError` unless an array is split over inner axes of `mesh` only."""
    if not inner:
        raise ValueError(
            f"`{name}` must be replicated on a mesh whose axes all share the data, got"
            f" one that is sharded by {sharding}. To shard the model inside groups of"
            " devices, give the mesh an axis more, such as"
            " pj.data_mesh(axis_name=('host', 'fsdp')), and average over the first:"
            " axis_name='host'. To replicate it, pass"
            " jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))."
        )
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"`{name}` must have a jax.sharding.NamedSharding, which names the axes"
            f" over which it is sharded; got {sharding}. Place it with"
            f" jax.device_put(leaf, NamedSharding(mesh, PartitionSpec({inner[0]!r})))."
        )
    used = {axis for entry in sharding.spec for axis in _names(entry)}
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
    """Raises a `ValueError` unless all shards of an array have the same shape."""
    for axis, entry in enumerate(spec):
        parts = math.prod(mesh.shape[x] for x in _names(entry))
        if shape[axis] % parts:
            raise ValueError(
                f"`{name}` must divide among the devices along {entry!r}: got axis"
                f" {axis} of shape {shape} for {parts} devices. Pad it, or shard"
                " another axis."
            )


def _above_one(spec: P, mesh: Mesh) -> P:
    """Returns a spec without axes of size 1 and without what follows the last axis."""
    found = [tuple(n for n in _names(e) if mesh.shape[n] > 1) for e in spec]
    while found and not found[-1]:
        found.pop()
    return P(*(entry[0] if len(entry) == 1 else entry or None for entry in found))


def _names(entry: Any) -> tuple[str, ...]:
    """Returns the axes over which a spec splits one axis of an array."""
    return () if entry is None else axes(entry)


def split_axes(spec: P, sizes: Any) -> frozenset[str]:
    """Returns the axes of more than one device over which a spec splits an array.

    Args:
      spec: The spec.
      sizes: The sizes of the axes, by name.
    """
    return frozenset(n for entry in spec for n in _names(entry) if sizes[n] > 1)


def shard_form(form: Any, spec: P, sizes: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the shard of an array on one device.

    Args:
      form: The array, or its shape and dtype.
      spec: The spec by which it is split.
      sizes: The sizes of the axes, by name.
    """
    parts = [math.prod(sizes[name] for name in _names(entry)) for entry in spec]
    parts += [1] * (len(form.shape) - len(parts))
    shape = tuple(n // k for n, k in zip(form.shape, parts, strict=True))
    return jax.ShapeDtypeStruct(shape, form.dtype)


def optimizer_specs(opt_state: Any, params: Any, specs: tuple[P, ...]) -> Any:
    """Returns the specs of an optimizer's state, whose arrays are split as parameters.

    An Optax state holds moments, averages and accumulated gradients in pytrees like the
    parameters. A leaf whose path ends with the path of a parameter of the same shape
    therefore has the spec of that parameter. All others, such as counters, are split
    over no axis.

    Args:
      opt_state: The state, or its shapes.
      params: The parameters, or their shapes.
      specs: A spec for each leaf of the parameters.

    Returns:
      A pytree like `opt_state`, of partition specs.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> params = {"w": jnp.zeros((4, 2)), "b": jnp.zeros(2)}
      >>> opt_state = optax.sgd(0.1, momentum=0.9).init(params)
      >>> found = optimizer_specs(opt_state, params, (P(), P("fsdp")))
      >>> found[0].trace["w"] == P("fsdp"), found[0].trace["b"] == P()
      (True, True)
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    known = {
        (path, tuple(leaf.shape)): spec
        for (path, leaf), spec in zip(leaves, specs, strict=True)
    }

    def spec(path: Any, leaf: Any) -> P:
        ends = (path[start:] for start in range(len(path) + 1))
        found = (known.get((end, tuple(leaf.shape))) for end in ends)
        return next((each for each in found if each is not None), P())

    return jax.tree_util.tree_map_with_path(spec, opt_state)


def cut_axes(params: Any, specs: tuple[P, ...], devices: int) -> tuple[int | None, ...]:
    """Returns the axis along which each parameter is split with a sharded optimizer.

    It is the first axis that divides among the devices and is not split inside a group.

    Args:
      params: The parameters, or their shapes.
      specs: A spec for each leaf of the parameters, over inner axes.
      devices: Number of devices, or groups, that share the data.

    Returns:
      An axis for each leaf, or `None` if a leaf has no such axis.

    Examples:
      >>> import jax.numpy as jnp
      >>> params = [jnp.zeros((3, 8)), jnp.zeros((8, 8)), jnp.zeros(3)]
      >>> cut_axes(params, (P(), P("fsdp"), P()), 4)
      (1, 1, None)
    """

    def cut(leaf: Any, spec: P) -> int | None:
        inside = {axis for axis, entry in enumerate(spec) if entry is not None}
        axes = (
            axis
            for axis, length in enumerate(leaf.shape)
            if axis not in inside and length % devices == 0
        )
        return next(axes, None) if math.prod(leaf.shape) else None

    leaves = jax.tree.leaves(params)
    return tuple(map(cut, leaves, specs))


def cut_spec(cut: int | None, axis_name: AxisName) -> P:
    """Returns the spec of an array that is split over the axes of the data.

    Args:
      cut: The axis along which it is split, or `None`.
      axis_name: Axis or axes of the data.

    Examples:
      >>> cut_spec(1, "data") == P(None, "data"), cut_spec(None, "data") == P()
      (True, True)
    """
    return P() if cut is None else P(*[None] * cut, axis_name)


def together(inside: P, over_data: P) -> P:
    """Returns the spec of an array that is split inside groups and over the data.

    Args:
      inside: Its spec over inner axes.
      over_data: Its spec over the axes of the data, along other axes of the array.

    Examples:
      >>> together(P(None, "fsdp"), P("host")) == P("host", "fsdp")
      True
    """
    pairs = itertools.zip_longest(inside, over_data)
    return P(*(a if a is not None else b for a, b in pairs))


def of_all_groups(spec: P, axis_name: AxisName) -> P:
    """Returns the spec of arrays that differ between groups, over all axes of a mesh.

    The arrays of all groups are concatenated along their first axis.

    Args:
      spec: The spec of the array of one group.
      axis_name: Axis or axes of the data.

    Examples:
      >>> of_all_groups(P(None, "tp"), "host") == P("host", "tp")
      True
      >>> of_all_groups(P("fsdp"), "host") == P(("host", "fsdp"))
      True
    """
    first = (*axes(axis_name), *(_names(spec[0]) if spec else ()))
    return P(first[0] if len(first) == 1 else first or None, *spec[1:])


def constrained(tree: Any, specs: Any) -> Any:
    """Returns arrays that XLA must split over inner axes as `specs` say.

    Must be called inside the program of a step.

    Args:
      tree: Pytree of arrays.
      specs: A spec for each leaf, as a pytree like `tree` or in the order of the
        leaves. An empty tuple leaves the arrays as they are.
    """
    if specs == ():
        return tree
    leaves, structure = jax.tree.flatten(tree)
    wanted = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    pairs = zip(leaves, wanted, strict=True)
    found = [lax.with_sharding_constraint(*pair) for pair in pairs]
    return jax.tree.unflatten(structure, found)


def group_axes() -> tuple[AbstractMesh, tuple[str, ...]]:
    """Returns the mesh of the surrounding program, and the names of its inner axes."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return mesh, tuple(name for name, kind in kinds if kind == AxisType.Auto)


@contextlib.contextmanager
def as_on_shards() -> Iterator[None]:
    """Traces functions as `on_shards` would, outside of it, as a context."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = mesh.update(axis_types=(AxisType.Manual,) * len(mesh.axis_names))
    with jax.sharding.use_abstract_mesh(manual):
        yield


def on_shards(
    function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Returns a function that every device of a group runs on its own shards.

    Must be called inside the program of a step.

    Args:
      function: Function of the shards of one device.
      in_specs: Partition specs of its arguments, over inner axes.
      out_specs: Partition specs of its results, over inner axes.
    """
    _, inner = group_axes()
    return jax.shard_map(
        function,
        axis_names=set(inner),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )
