"""Functions with which the program of a step works inside a group of devices."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pipejax._internal.keys import as_numbers


def constrained(tree: Any, specs: Any) -> Any:
    """Returns arrays that XLA must split over inner axes as `specs` say.

    Must be called inside the program of a step. An empty tuple of specs leaves the
    arrays as they are.
    """
    if specs == ():
        return tree
    wanted = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))

    def split(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        pairs = zip(leaves, wanted, strict=True)
        found = [lax.with_sharding_constraint(*pair) for pair in pairs]
        return jax.tree.unflatten(structure, found)

    return as_numbers(split, tree)


def over_own_axes(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns `function(tree)`, where the function gets arrays over the program's axes.

    Arrays over axes of other types get their types back.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = jax.tree.map(lambda x: jax.typeof(x).sharding, tree)

    def others(own: Any) -> bool:
        return not (own.mesh.empty or mesh.empty) and own.mesh != mesh

    def untyped(x: jax.Array, own: Any) -> jax.Array:
        return jax.sharding.reshard(x, P()) if others(own) else x

    def typed(x: jax.Array, own: Any) -> jax.Array:
        if not others(own):
            return x
        with jax.sharding.use_abstract_mesh(own.mesh):
            return jax.sharding.reshard(x, own.spec)

    found = function(jax.tree.map(untyped, tree, types))
    return jax.tree.map(typed, found, types)


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
    """Returns a function that every device of a group runs on its own shards."""
    _, inner = group_axes()
    return jax.shard_map(
        function,
        axis_names=set(inner),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )
