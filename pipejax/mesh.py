"""Meshes, and programs that every device of a mesh runs on its own share.

The axes of a mesh may be Auto, as `data_mesh` makes them, or Explicit, as
`jax.make_mesh` does by default. A state has the axis types of its train step's mesh.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AxisName = str | tuple[str, ...]


class Rows(str):
    """The name of an axis of `jax.vmap`: what devices would do, done on one."""


def axes(axis_name: AxisName) -> tuple[str, ...]:
    """The names, one or more."""
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def data_mesh(
    num_devices: int | None = None,
    *,
    axis_name: AxisName = "data",
    hosts: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh over the first `num_devices` devices of all processes.

    Args:
      num_devices: how many; `None` takes every device.
      axis_name: name of the axis over which gradients are averaged, or of two axes,
        `("host", "device")`, for `pj.collectives.hierarchical`.
      hosts: of two axes, the extent of the first; `None` takes the processes that the
        devices belong to.
      devices: of which; `None` takes `jax.devices()`. With those that
        `pj.overlap.topology` returns, programs are compiled for absent accelerators.

    Raises:
      ValueError: if it is no integer, there are not that many devices, or they do not
        divide among hosts.

    >>> data_mesh(1).axis_names
    ('data',)
    """
    devices = list(jax.devices() if devices is None else devices)
    count = len(devices) if num_devices is None else num_devices
    valid = isinstance(count, int | np.integer) and not isinstance(count, bool)
    if not valid or not 1 <= count <= len(devices):
        raise ValueError(
            f"`num_devices` must be an integer between 1 and {len(devices)}, the"
            f" devices there are; got {num_devices!r}. On CPU, set"
            " `jax.config.update('jax_num_cpu_devices', n)` before the first JAX call"
            " to have n of them."
        )
    names = axes(axis_name)
    shape = (count,) if len(names) == 1 else _by_host(devices[:count], hosts)
    if len(names) != len(shape) or (hosts is not None and len(names) == 1):
        raise ValueError(
            "`axis_name` must be one name, or two where there are hosts and devices of"
            f" each; got {axis_name!r} with {hosts=}. For example"
            " pj.data_mesh(axis_name=('host', 'device'))."
        )
    types = (AxisType.Auto,) * len(shape)
    chosen = devices[:count]
    if len({getattr(device, "slice_index", 0) for device in chosen}) > 1:
        # `jax.make_mesh` refuses several slices of a TPU.
        return Mesh(np.array(chosen).reshape(shape), names, axis_types=types)
    return jax.make_mesh(shape, names, axis_types=types, devices=chosen)


def _by_host(devices: list[Any], hosts: int | None) -> tuple[int, int]:
    """Rows and columns: a row's devices belong to one host."""
    if hosts is None:
        hosts = len({device.process_index for device in devices})
    if hosts < 1 or len(devices) % hosts:
        raise ValueError(
            f"`hosts` must divide the {len(devices)} devices among hosts, got {hosts}."
            " Choose `num_devices` a multiple of it."
        )
    return hosts, len(devices) // hosts


def axis_size(axis_name: AxisName) -> int:
    """Returns how many devices the axes span; a ValueError where they are not bound."""
    try:
        return int(lax.axis_size(axis_name))
    except NameError:
        raise ValueError(
            "`axis_name` must be an axis of the surrounding shard_map or pmap, got"
            f" {axis_name!r}, which is not bound here. Call this inside jax.shard_map"
            f" over a mesh with the axis {axis_name!r}."
        ) from None


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Runs outside of the mesh that the caller has set by `jax.set_mesh`.

    What is computed on an array of another mesh is an error there.
    """
    with jax.set_mesh(Mesh(np.empty((), object), ())):
        yield


def on_mesh(
    local: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Returns `local` as a program that each device runs on its own share."""
    # Without `check_vma` a gradient stays the device's own (with it, jax.grad sums it
    # over the mesh, in step), and any loss function is accepted as it is.
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    explicit = AxisType.Explicit in mesh.axis_types

    @functools.wraps(local)  # profiles and reports show its name
    def on_own_mesh(*args: Any) -> Any:
        # The mesh of the caller's `jax.set_mesh` may have axes of another type.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            if explicit:  # `shard_map` wants arrays laid out as its specs say
                args = jax.tree.map(_resharded, in_specs, args, is_leaf=_is_spec)
            return mapped(*args)

    return on_own_mesh


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)


def _resharded(spec: P, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, spec), tree)


def laid_out(leaf: Any, sharding: NamedSharding) -> Any:
    """An array that lies elsewhere on purpose, moved; `jit` places all others."""
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
        return leaf
    if leaf.committed and leaf.sharding != sharding:
        return jax.device_put(leaf, sharding)
    return leaf
