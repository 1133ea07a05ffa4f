"""Places the inputs that all devices share."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._core.checks import check_arrays
from pipejax._core.executors import StepConfig
from pipejax._core.step import is_deleted
from pipejax._internal.keys import as_numbers
from pipejax._internal.mesh import axes, inner_axes, is_attached
from pipejax._internal.shards import inner_specs, over
from pipejax._internal.types import Leaf, Tree


def shared_on_mesh(shared: Tree, config: StepConfig) -> tuple[Tree, tuple[P, ...]]:
    """Returns what all devices share, as it lies on the mesh, and its inner specs.

    Arrays on the devices of the mesh stay as they are, and so do Python numbers, which
    are weakly typed in a program. Other arrays are copied to all devices.
    """
    check_arrays("shared", shared)
    mesh, axis_name = config.mesh, config.axis_name
    place = functools.partial(_on_mesh, mesh, axes(axis_name))
    placed = jax.tree_util.tree_map_with_path(place, shared)
    leaves = jax.tree.leaves(placed)
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    if traced or not inner_axes(mesh, axis_name):
        return placed, ()
    return placed, inner_specs("shared", placed, mesh, axis_name)


def check_overwritten(shared: Tree, state: Tree, *, donate: bool) -> None:
    """Raises a `ValueError` for an array that a step has overwritten, or that it may.

    With `donate`, a step may overwrite the arrays of `state`.
    """
    if shared is None:
        return
    leaves = jax.tree.leaves(state) if donate else []
    # While traced, the program around the step says what is donated.
    own = {id(leaf) for leaf in leaves if not isinstance(leaf, jax.core.Tracer)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shared):
        if is_deleted(leaf) or id(leaf) in own:
            raise ValueError(
                "`shared` must hold no array of a state that a step made with"
                " donate=True may overwrite; got"
                f" `shared{jax.tree_util.keystr(path)}`. Copy it before the step:"
                " `jnp.copy(state.step)`, `train.whole_params(state)`, or"
                " `jax.tree.map(jnp.copy, tree)`."
            )


def _on_mesh(mesh: Mesh, data: tuple[str, ...], path: Any, leaf: Leaf) -> Leaf:
    if isinstance(leaf, jax.core.Tracer | bool | int | float | complex):
        return leaf
    sharding, whole = getattr(leaf, "sharding", None), NamedSharding(mesh, P())
    if isinstance(leaf, jax.ShapeDtypeStruct) and sharding is None:
        # The shape of a Python number is weakly typed.
        return leaf if leaf.weak_type else leaf.update(sharding=whole)
    if not is_attached(mesh) and sharding is None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)
    if sharding is None or sharding.device_set != whole.device_set:
        return _copied(leaf, whole)
    if not _is_whole(sharding, mesh, data):
        raise ValueError(
            "`shared` must be whole on every device, or on every group of devices,"
            " because every loss gets all of it; got"
            f" `shared{jax.tree_util.keystr(path)}`, split by {sharding}. Gather the"
            " parameters of a sharded optimizer, `train.whole_params(state)`. Give"
            " examples as part of `batch`, and one replica of what `pmap` returned:"
            " flax.jax_utils.unreplicate(tree)."
        )
    return leaf


def _is_whole(sharding: Any, mesh: Mesh, data: tuple[str, ...]) -> bool:
    """Returns whether an array is split over no axis of the data.

    On a mesh whose axes all share the data, an array of another mesh must not be split
    either, such as one that `pmap` has made.
    """
    if sharding.is_fully_replicated or len(data) == len(mesh.axis_names):
        return sharding.is_fully_replicated
    if not isinstance(sharding, NamedSharding):
        return True  # `inner_specs` refuses it
    part = NamedSharding(sharding.mesh, over(sharding.spec, data))
    return part.is_fully_replicated


def _copied(leaf: Leaf, sharding: NamedSharding) -> jax.Array:
    """Returns a copy on all devices, whose memory nobody writes into."""

    def make(own: Any) -> jax.Array:
        if sharding.is_fully_addressable:
            # On CPUs, an array may share the memory of a NumPy array.
            own = np.array(own) if isinstance(own, np.ndarray) else own
            return jax.device_put(own, sharding)
        # `jax.device_put` would compare the processes' arrays in every step.
        own = np.array(own)
        parts = [jax.device_put(own, x) for x in sharding.addressable_devices]
        return jax.make_array_from_single_device_arrays(own.shape, sharding, parts)

    return as_numbers(make, leaf)
