"""Meshes, and programs that every device of a mesh runs on its share of the data.

The axes of a mesh may have type Auto, as those of `data_mesh`, or Explicit, as those of
`jax.make_mesh`. The arrays of a train state have the axis types of its mesh. Inside a
program, all axes have type Auto: an optimizer need not say how its results are split.
The loss function alone sees the types of the mesh.
"""

import contextlib
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

_log = logging.getLogger(__name__)

AxisName = str | tuple[str, ...]
Like = Callable[..., Any]
"""From the arguments of a program to a prefix of its results: an argument in place of
results with the same axis types, and `None` in place of results whose axes have type
Auto."""


def axes(axis_name: AxisName) -> tuple[str, ...]:
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def data_mesh(
    num_devices: int | None = None,
    *,
    axis_name: AxisName = "data",
    hosts: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Returns a mesh over the first devices of all processes.

    Unlike `jax.make_mesh`, it accepts the devices of several TPU slices.

    Args:
      num_devices: Number of devices. `None` takes all of them.
      axis_name: Name of the mesh axis over which gradients are averaged. For
        `pj.collectives.hierarchical` and for sharded models, the names of the axis of
        hosts and of that of the devices of each host, such as `("host", "fsdp")`.
      hosts: Size of the first of two axes. `None` takes the number of TPU slices that
        the devices belong to, or if there is a single slice, the number of processes.
      devices: Devices to choose from, such as those of `pj.overlap.topology`. `None`
        takes `jax.devices()`.

    Returns:
      A mesh of shape (num_devices,), or (hosts, num_devices / hosts) for two axes, with
      axes of type Auto.

    Raises:
      ValueError: If an argument breaks its rule, or `hosts` does not divide the number
        of devices.

    Examples:
      >>> import pipejax as pj
      >>> pj.data_mesh(1).axis_names
      ('data',)
      >>> dict(pj.data_mesh(1, axis_name=("host", "device")).shape)
      {'host': 1, 'device': 1}
    """
    devices = list(jax.devices() if devices is None else devices)
    count = len(devices) if num_devices is None else num_devices
    valid = isinstance(count, int | np.integer) and not isinstance(count, bool)
    if not valid or not 1 <= count <= len(devices):
        raise ValueError(
            f"`num_devices` must be an integer between 1 and {len(devices)}, the number"
            f" of devices; got {num_devices!r}. On CPU, call"
            " `jax.config.update('jax_num_cpu_devices', n)` before any other JAX call"
            " to get n devices."
        )
    names = axes(axis_name)
    shape = (count,) if len(names) == 1 else _by_host(devices[:count], hosts)
    if len(names) != len(shape) or (hosts is not None and len(names) == 1):
        raise ValueError(
            "`axis_name` must be one name, or two names for an axis of hosts and an"
            f" axis of the devices of each host; got {axis_name!r} with {hosts=}. Call"
            " for example pj.data_mesh(axis_name=('host', 'device'))."
        )
    types = (AxisType.Auto,) * len(shape)
    chosen, two = devices[:count], len(names) > 1
    if two:
        # Each row has the devices of one host. `jax.make_mesh` would order those of a
        # TPU by its links.
        chosen = sorted(chosen, key=_slice_and_process)
    if two or len({*map(_slice_of, chosen)}) > 1:  # which `jax.make_mesh` refuses
        return Mesh(np.array(chosen).reshape(shape), names, axis_types=types)
    return jax.make_mesh(shape, names, axis_types=types, devices=chosen)


def _slice_of(device: Any) -> int:
    return getattr(device, "slice_index", 0)


def _slice_and_process(device: Any) -> tuple[int, int]:
    return _slice_of(device), device.process_index


def _by_host(devices: list[Any], hosts: int | None) -> tuple[int, int]:
    """Returns the shape of a mesh in which each row has the devices of one host."""
    if hosts is None:
        places = Counter(map(_slice_of, devices))
        if len(places) == 1:
            places = Counter(device.process_index for device in devices)
        if len({*places.values()}) > 1:
            raise ValueError(
                "`hosts` must be given where processes or slices do not have equally"
                f" many devices, got None with {dict(places)}. Say how many rows of"
                " devices the mesh has."
            )
        hosts = len(places)
        if hosts == len(devices) > 1:
            _log.warning(
                "each of %d processes counts as a host with one device. If a host runs"
                " several processes, pass hosts=... to pj.data_mesh",
                hosts,
            )
    if hosts < 1 or len(devices) % hosts:
        raise ValueError(
            f"`hosts` must divide the {len(devices)} devices into equal parts, got"
            f" {hosts}. Make `num_devices` a multiple of `hosts`."
        )
    return hosts, len(devices) // hosts


def size_along(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> int:
    """Returns the number of places along one axis of a mesh, or along several."""
    return math.prod(mesh.shape[name] for name in axes(axis_name))


def axis_size(axis_name: AxisName) -> int:
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
    """Leaves the mesh that the caller has set with `jax.set_mesh`."""
    # Under a mesh that is set, JAX raises an error for a computation on arrays of
    # another mesh. While tracing, the mesh stays set.
    if jax.sharding.get_abstract_mesh().empty or is_traced():
        yield
        return
    with jax.set_mesh(Mesh(np.empty((), object), ())):
        yield


def is_traced() -> bool:
    """Returns whether this runs inside a transformation, such as `jax.eval_shape`."""
    with jax.transfer_guard("allow"):
        return isinstance(jnp.zeros(()), jax.core.Tracer)


def inner_axes(mesh: Mesh, axis_name: AxisName) -> tuple[str, ...]:
    """Returns the axes of a mesh over which a group shards its copy of the model."""
    return tuple(name for name in mesh.axis_names if name not in axes(axis_name))


def processes_of_groups(mesh: Mesh, axis_name: AxisName) -> list[set[int]]:
    """Returns for each place along the data's axes the processes of its devices."""
    along = [mesh.axis_names.index(name) for name in axes(axis_name)]
    devices = np.moveaxis(mesh.devices, along, range(len(along)))
    groups = devices.reshape(size_along(mesh, axis_name), -1)
    return [{device.process_index for device in group} for group in groups]


def auto_mesh(mesh: Mesh) -> Mesh:
    """Returns the mesh with axes of type Auto."""
    return Mesh(mesh.devices, mesh.axis_names)


def explicit_axes(mesh: Mesh, axis_name: AxisName) -> tuple[str, ...]:
    """Returns the inner axes of type Explicit."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    inner = inner_axes(mesh, axis_name)
    return tuple(name for name in inner if types[name] == AxisType.Explicit)


def on_mesh(
    local: Callable[..., Any],
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    axis_name: AxisName | None = None,
) -> Callable[..., Any]:
    """Returns a function that runs `local` on every device or group of a mesh.

    Unlike the result of `jax.shard_map`, it takes arrays of any axis types, and ignores
    the mesh that the caller has set. `local` runs over `axis_name`, by default all
    axes. XLA splits over the others. All axes of the results have type Auto.
    """

    def specs(*_: Any) -> tuple[Any, Any]:
        return in_specs, out_specs

    return on_mesh_by(specs, local, mesh, axis_name)


def on_mesh_by(
    specs: Callable[..., tuple[Any, Any]],
    local: Callable[..., Any],
    mesh: Mesh,
    axis_name: AxisName | None = None,
    like: Like | None = None,
) -> Callable[..., Any]:
    auto = auto_mesh(mesh)
    explicit = auto != mesh
    names = set(mesh.axis_names if axis_name is None else axes(axis_name))

    @functools.wraps(local)  # profiles and reports show the name of `local`
    def on_own_mesh(*args: Any) -> Any:
        in_specs, out_specs = specs(*args)
        # With `check_vma`, `jax.grad` would sum gradients over the mesh within the
        # step. Without it, each device keeps its own gradient, and any loss function is
        # accepted as it is.
        mapped = jax.shard_map(
            local,
            mesh=auto,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=names,
            check_vma=False,
        )
        # The mesh that the caller has set may have axes of another type.
        with jax.sharding.use_abstract_mesh(auto.abstract_mesh):
            given = jax.sharding.reshard(args, P()) if explicit else args
            found = mapped(*given)
        if not explicit or like is None:
            return found
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return _typed(found, like(*args))

    return on_own_mesh


def _typed(results: Any, like: Any) -> Any:
    """Returns results, each with the axis types of what is in its place in `like`."""

    def one(like: Any, results: Any) -> Any:
        if like is None or results is None:
            return results
        return jax.sharding.reshard(results, jax.typeof(like).sharding.spec)

    return jax.tree.map(one, like, results, is_leaf=lambda node: node is None)


def is_attached(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].client.runtime_type != "compile_only_runtime"
