"""Meshes and their axis types, chosen in this one place.

`jax.make_mesh` makes Explicit axes, under which `shard_map` refuses an ordinary array
where a sharded one is named. Every program of pipejax runs on Auto axes.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

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
    return jax.make_mesh(
        shape,
        names,
        axis_types=(jax.sharding.AxisType.Auto,) * len(shape),
        devices=devices[:count],
    )


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


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Runs outside of the mesh that the caller has set by `jax.set_mesh`.

    What is computed on an array of another mesh is an error there.
    """
    with jax.set_mesh(Mesh(np.empty((), object), ())):
        yield


def with_auto_axes(mesh: Mesh) -> Mesh:
    """The same devices and names, every axis of type Auto."""
    return Mesh(mesh.devices, mesh.axis_names)


def on_mesh(
    local: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`local`, which each device runs on its own share."""
    # Without `check_vma` a gradient stays the device's own (with it, jax.grad sums it
    # over the mesh, in step), and any loss function is accepted as it is.
    return jax.shard_map(
        local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def laid_out(leaf: Any, sharding: NamedSharding) -> Any:
    """An array that lies elsewhere on purpose, moved; `jit` places all others."""
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
        return leaf
    if leaf.committed and leaf.sharding != sharding:
        return jax.device_put(leaf, sharding)
    return leaf
