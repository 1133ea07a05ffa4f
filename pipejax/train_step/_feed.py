"""Makes global batches, of which each process gives its own part, and places them."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._core.checks import (
    check_count,
    common_length,
    fault_of,
    named_shapes,
    no_array,
)
from pipejax._core.executors import StepConfig, spans_cpu_processes
from pipejax._internal.communication_thread import join
from pipejax._internal.keys import as_numbers, is_key
from pipejax._internal.mesh import AxisName, axes, inner_axes, size_along
from pipejax._internal.shards import over
from pipejax._internal.types import Leaf, Tree


def data_sharding(config: StepConfig, axis_name: AxisName | None) -> NamedSharding:
    """Returns the sharding of a batch that is split over `axis_name`."""
    names = axes(config.axis_name if axis_name is None else axis_name)
    own, inner = axes(config.axis_name), inner_axes(config.mesh, config.axis_name)
    if names[: len(own)] != own or not set(names[len(own) :]) <= set(inner):
        raise ValueError(
            f"`axis_name` must begin with {config.axis_name!r}, the axes of the train"
            f" step, and go on with inner axes of its mesh, {inner}; got {axis_name!r}."
        )
    return NamedSharding(config.mesh, P(names if len(names) > 1 else names[0]))


def plain_batch(batch: Tree) -> Tree:
    """Returns a batch in which every mapping that JAX takes for a leaf is a dict.

    A tokenizer returns such a mapping, a `collections.UserDict`.

    Examples:
      >>> import collections
      >>> plain_batch([collections.UserDict({"a": collections.UserDict({"b": 1})})])
      [{'a': {'b': 1}}]
    """

    def one(leaf: Leaf) -> Any:
        return plain_batch(dict(leaf)) if isinstance(leaf, Mapping) else leaf

    return jax.tree.map(one, batch)


def global_batch(local: Any, data: NamedSharding) -> Tree:
    """Makes the global batch of which this process has the part `local`."""
    every = size_along(data.mesh, data.spec[0])
    indices = data.addressable_devices_indices_map((every,)).values()
    shares = len({index[0].start for index in indices if index is not None})
    local = jax.tree_util.tree_map_with_path(_own_copy, plain_batch(local))
    length = common_length(local)
    if not length or length % shares:
        raise ValueError(
            "`local` must hold arrays with one common leading axis, the examples of"
            f" this process, a positive multiple of its {shares} shares of a batch; got"
            f" shapes {named_shapes('local', local)}. Drop the remainder, make arrays"
            " of lists, and give what is no example to `train.step` as `shared`."
        )
    make = functools.partial(jax.make_array_from_process_local_data, data)
    # With several processes, JAX does not take this for a transfer that is asked for.
    with jax.transfer_guard("allow"):
        return jax.tree.map(functools.partial(as_numbers, make), local)


def _own_copy(path: Any, leaf: Leaf) -> Any:
    """Returns a leaf of a batch as an array whose memory nobody writes into."""
    if isinstance(leaf, jax.Array):  # cannot be written into
        if isinstance(leaf, jax.core.Tracer) or leaf.is_fully_addressable:
            return leaf if is_key(leaf) else np.asarray(leaf)
        raise ValueError(
            "`local` must be this process's part of a batch, got the global array"
            f" `local{jax.tree_util.keystr(path)}`. Give a global batch to `train.step`"
            " as it is."
        )
    cause = None
    try:
        # A copy of a masked array would lose the mask.
        found = leaf if isinstance(leaf, np.ma.MaskedArray) else np.array(leaf)
        fault = fault_of(found)
    except Exception as error:  # whatever the `__array__` of another library raises
        cause, fault = error, f"a {type(leaf).__name__}: {error}"
    if fault:
        raise no_array("local", path, fault) from cause
    return found


def laid_out(batch: Tree, config: StepConfig) -> tuple[Tree, tuple[P, ...]]:
    """Returns a batch that lies on the mesh, split over the axes of the step.

    The second result is a spec for each array of a group's share, over inner axes.

    Arrays that are split over these axes first and over inner axes then, as
    `P(("host", "fsdp"))`, stay as they are. On a mesh without inner axes, `jax.jit`
    places arrays that are not committed to devices.
    """
    data, own = config.data, axes(config.axis_name)
    inner = inner_axes(config.mesh, config.axis_name)
    arrays = jax.tree.map(functools.partial(_laid_out, data, own, bool(inner)), batch)
    found = list(map(_spec, jax.tree.leaves(arrays))) if inner else []
    specs = tuple(over(spec, inner) for spec in found if spec is not None)
    return arrays, specs if len(specs) == len(found) else ()


def _spec(leaf: Leaf) -> P | None:
    """Returns the spec of an array; `None` if it is traced on a mesh with Auto axes."""
    if not isinstance(leaf, jax.core.Tracer):
        return leaf.sharding.spec
    sharding = jax.typeof(leaf).sharding
    return sharding.spec if sharding.mesh.are_all_axes_explicit else None


def _laid_out(
    data: NamedSharding, own: tuple[str, ...], shards: bool, leaf: Leaf
) -> Leaf:
    """Returns an array of a batch, split over `own`, the axes of the data."""
    if isinstance(leaf, jax.core.Tracer):
        return leaf  # its sharding is not known
    if isinstance(leaf, jax.ShapeDtypeStruct):
        keeps = not shards or _is_split(leaf.sharding, data, own)
        return leaf if keeps else leaf.update(sharding=data)
    if isinstance(leaf, jax.Array) and leaf.committed:
        split = shards and _is_split(leaf.sharding, data, own)
        return leaf if split or leaf.sharding == data else _moved(leaf, data)
    if isinstance(leaf, np.ndarray) and data.mesh.devices.flat[0].platform == "cpu":
        # The step may read the memory of this array after its call has returned.
        leaf = np.array(leaf)
    return jax.device_put(leaf, data) if shards else leaf


def _moved(leaf: jax.Array, data: NamedSharding) -> jax.Array:
    alike = leaf.sharding.is_equivalent_to(data, leaf.ndim)
    mesh: Any = data.mesh
    if alike or not spans_cpu_processes(mesh):
        return jax.device_put(leaf, data)
    # This is a collective, of which only one may run at a time.
    join()
    return jax.block_until_ready(jax.device_put(leaf, data))


def _is_split(sharding: Any, data: NamedSharding, own: tuple[str, ...]) -> bool:
    if not isinstance(sharding, NamedSharding) or not sharding.spec:
        return False
    first = sharding.spec[0]
    same = sharding.device_set == data.device_set
    return same and first is not None and axes(first)[: len(own)] == own


def least_of_all_processes(own: int) -> int:
    """Returns the least number that any process gives, by means of a collective."""
    own = check_count("own", own, 0)
    return int(multihost_utils.process_allgather(np.int32(own)).min())


def check_global(batch: Tree, mesh: Mesh) -> None:
    """Raises a `ValueError` if an array of `batch` belongs to this process alone.

    On a mesh of one process such an array is the global batch. On a mesh of several
    processes it is ambiguous: it may be the global batch or this process's part.
    """
    if not mesh.is_multi_process:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        is_global = isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct) or (
            isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        )
        if not is_global:
            raise ValueError(
                "`batch` must be a global array on a mesh of several processes, got"
                f" `batch{jax.tree_util.keystr(path)}`, a {type(leaf).__name__} of this"
                " process alone. Give each process its own part of the batch:"
                " `train.step(state, train.batch(part))`."
            )
