"""Sums messages over devices in a program of its own, for the communication thread."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax.collectives import Beside
from pipejax.mesh import AxisName, axes, inner_axes, on_mesh
from pipejax.message import Message, Reduced, on_shards_of, reduced, summed
from pipejax.shards import UNSHARDED

from ._config import StepConfig

# From a message and the codec states to the sum and the codec states after it.
Reduce = Callable[[Message, Any], tuple[Reduced, Any]]


def make_reduce(config: StepConfig, where: Mesh) -> Reduce:
    """Returns a function that sums messages over devices.

    Args:
      config: The step whose messages are summed.
      where: The mesh that sums, as `Executor.reduction_mesh` returns it: that of the
        step, or CPUs beside it.

    Returns:
      A function from a message and the codec states to the sum and the codec states
      after it. It waits for the sum. The `arrived` of the sum is always true.
    """
    if where is not config.mesh:
        return reduce_by_copy(config, where)
    if _groups_in_processes(where, config.axis_name):
        return reduce_by_place(config)
    return reduce_in_place(config)


def reduction_mesh(mesh: Mesh, axis_name: AxisName) -> Mesh:
    """Returns the mesh on which the communication thread sums.

    Args:
      mesh: The mesh of the step.
      axis_name: The mesh axis of the data, or a tuple of such axes.

    Returns:
      `mesh` if it consists of CPUs, or else a mesh of CPUs beside its devices.
    """
    if mesh.devices.flat[0].platform == "cpu":
        return mesh
    return _one_cpu_a_process(mesh, axis_name)


def reduce_in_place(config: StepConfig) -> Reduce:
    """Returns a function that sums each device's part of a message, on the mesh itself.

    The function waits for the sum, so that it raises the error if the reduction fails.
    """
    own = P(config.axis_name)

    def local(message: Message, before: Any) -> Any:
        # `Host` replaces this value, and drops codec states that follow from zeros.
        arrived = jnp.array(True)
        return reduced(message, before, arrived, config.sums_by, config.axis_name)

    compiled = jax.jit(config.on_mesh(local, (own, own), (P(), own)))

    def reduce(message: Message, states: Any) -> Any:
        return jax.block_until_ready(compiled(message, states))

    return reduce


def reduce_by_place(config: StepConfig) -> Reduce:
    """Returns a function that sums the shards at each place in a group by themselves.

    XLA's CPU client runs a program on several devices of a process only when all
    earlier ones have ended. The compute of a sharded model is such a program, and would
    wait for the reduction. The reduction therefore runs as one program for each place
    in a group, each on a single device of every process. It does the same on a device
    as `reduce_in_place`.
    """
    mesh, axis = config.mesh, config.axis_name
    meshes, own = _by_place(mesh, axis), P(axis)

    @functools.cache
    def programs(sets: tuple[tuple[int, ...], ...]) -> list[Any]:
        all_reduce = Beside(config.sums_by, sets)

        def local(message: Message, before: Any) -> tuple[Reduced, Any]:
            total, after = summed(message, before, all_reduce, axis)
            return Reduced.of(total, jnp.array(True)), after

        mapped = (on_mesh(local, x, (own, own), (P(), own)) for x in meshes)
        return [jax.jit(each) for each in mapped]

    def reduce(message: Message, states: Any) -> tuple[Reduced, Any]:
        sharded = on_shards_of(message, config.sums_by)
        given = message._replace(shards=UNSHARDED), states
        calls = zip(programs(sharded.sets(mesh.shape)), meshes, strict=True)
        # A call returns before its sum is there.
        done = [program(*_on_place(given, place, own)) for program, place in calls]
        totals, after = zip(*jax.block_until_ready(done), strict=True)
        total = _together([x._replace(sum=_as(message, x.sum)) for x in totals], mesh)
        # All devices of a group keep their codec states, or none of them does.
        usable = all(bool(x.usable.addressable_data(0)) for x in totals)
        if not usable:
            return total, states
        return total, jax.tree.map(_put_together, states, *after)

    return reduce


def _groups_in_processes(mesh: Mesh, axis_name: AxisName) -> bool:
    """Returns whether every process has a whole group of several CPU devices."""
    if not mesh.is_multi_process or not inner_axes(mesh, axis_name):
        return False
    columns = np.stack([x.devices.flatten() for x in _by_place(mesh, axis_name)])
    return all(len({d.process_index for d in group}) == 1 for group in columns.T)


def _by_place(mesh: Mesh, axis_name: AxisName) -> list[Mesh]:
    """Returns a mesh of the devices at each place in a group, one of each group."""
    data = [mesh.axis_names.index(name) for name in axes(axis_name)]
    rows = np.moveaxis(mesh.devices, data, range(len(data)))
    columns = rows.reshape(*rows.shape[: len(data)], -1)
    return [Mesh(columns[..., i], axes(axis_name)) for i in range(columns.shape[-1])]


def _on_place(tree: Any, place: Mesh, spec: P) -> Any:
    """Returns the parts of arrays on the devices of `place`, as arrays of their own."""

    def one(array: jax.Array) -> jax.Array:
        parts = {x.device: x.data for x in array.addressable_shards}
        here = [parts[device] for device in place.local_devices]
        shape = (place.size * here[0].shape[0], *here[0].shape[1:])
        sharding = NamedSharding(place, spec)
        return jax.make_array_from_single_device_arrays(shape, sharding, here)

    return jax.tree.map(one, tree)


def _as(message: Message, total: Message) -> Message:
    """Returns the sum of a place as a part of the sum of a sharded message."""
    return total._replace(shards=message.shards)


def _together(totals: list[Reduced], mesh: Mesh) -> Reduced:
    """Returns the sums of all places as one, which is finite if all of them are."""
    first = totals[0]

    def put(spec: P, *parts: jax.Array) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        shards = [shard.data for part in parts for shard in part.addressable_shards]
        sizes = [math.prod(mesh.shape[x] for x in axes(e or ())) for e in spec]
        sizes += [1] * (parts[0].ndim - len(sizes))
        shape = tuple(n * k for n, k in zip(parts[0].shape, sizes, strict=True))
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    finite = all(bool(x.finite.addressable_data(0)) for x in totals)
    same = [x._replace(finite=_constant(x.finite, finite)) for x in totals]
    return jax.tree.map(put, _specs(first), *same)


def _constant(like: jax.Array, value: bool) -> jax.Array:
    """Returns a scalar with the devices of `like`, without a collective."""
    parts = [jax.device_put(value, x.device) for x in like.addressable_shards]
    return jax.make_array_from_single_device_arrays((), like.sharding, parts)


def _put_together(like: jax.Array, *parts: jax.Array) -> jax.Array:
    """Undoes `_on_place` on codec states, which have the form of those before."""
    shards = [shard.data for part in parts for shard in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def reduce_by_copy(config: StepConfig, cpus: Mesh) -> Reduce:
    """Returns a function that sums on `cpus`: it copies out, sums, and copies back.

    `cpus` has one device for each process. A process first adds up the parts of its own
    devices or groups, in their order. If it has only some of the shards of a group, it
    sends zeros in place of the others.
    """
    mesh, axis = config.mesh, config.axis_name
    between = reduce_in_place(config.at(cpus))
    (cpu,) = cpus.local_devices

    def out(array: jax.Array) -> jax.Array:
        parts = _by_group(array, array.shape[0] // config.devices)
        own = jax.device_put(sum(parts[1:], start=parts[0]), cpu)
        shape = (cpus.size * own.shape[0], *own.shape[1:])
        return jax.make_array_from_single_device_arrays(
            shape, NamedSharding(cpus, P(axis)), [own]
        )

    def back(total: jax.Array, spec: P) -> jax.Array:
        own, sharding = np.asarray(total.addressable_data(0)), NamedSharding(mesh, spec)
        places = sharding.addressable_devices_indices_map(own.shape)
        return jax.make_array_from_single_device_arrays(
            own.shape,
            sharding,
            [jax.device_put(own[index], device) for device, index in places.items()],
        )

    def reduce(message: Message, states: Any) -> Any:
        total, states = between(jax.tree.map(out, message), states)
        return jax.block_until_ready(jax.tree.map(back, total, _specs(total))), states

    return reduce


def _by_group(array: jax.Array, length: int) -> list[np.ndarray]:
    """Returns the part of each group that has shards in this process, in their order.

    Args:
      array: An array of all groups, concatenated along the first axis.
      length: The length of the first axis of one group's array.
    """
    groups: dict[int, np.ndarray] = {}
    for shard in sorted(array.addressable_shards, key=lambda s: s.index[0].start or 0):
        start = shard.index[0].start or 0
        group, first = divmod(start, length)
        shape = (length, *array.shape[1:])
        if group not in groups:
            groups[group] = np.zeros(shape, array.dtype)
        # Other devices have copies of the same part, of which one is sent.
        if shard.replica_id == 0 and shard.data.shape == shape:
            groups[group] = np.asarray(shard.data)
        elif shard.replica_id == 0:
            rows = slice(first, first + shard.data.shape[0])
            groups[group][(rows, *shard.index[1:])] = np.asarray(shard.data)
    return list(groups.values())


def _specs(total: Reduced) -> Reduced:
    """Returns the partition spec of every array of a sum over inner axes."""
    shards, whole = total.sum.shards, jax.tree.map(lambda _: P(), total)
    if not shards:
        return whole
    form = total.sum
    gradients, changes = map(jax.tree.structure, (form.gradients, form.changes))
    specs = whole.sum._replace(
        gradients=jax.tree.unflatten(gradients, shards.params),
        changes=jax.tree.unflatten(changes, shards.changes),
    )
    return whole._replace(sum=specs)


def _one_cpu_a_process(mesh: Mesh, axis_name: AxisName) -> Mesh:
    """Returns a mesh with one CPU device of each process in `mesh`, in their order."""
    processes = dict.fromkeys(device.process_index for device in mesh.devices.flat)
    try:
        cpus = {cpu.process_index: cpu for cpu in reversed(jax.devices("cpu"))}
    except RuntimeError:
        cpus = {}
    if missing := sorted(processes.keys() - cpus.keys()):
        raise ValueError(
            "`executor='host'` must have JAX's CPU backend beside the accelerators, got"
            f" none in processes {missing}. Leave JAX_PLATFORMS unset or name both:"
            " JAX_PLATFORMS=cuda,cpu."
        )
    devices = np.array([cpus[process] for process in processes])
    # All devices lie along the first axis of the data. The other axes have size 1.
    along = axes(axis_name)[0]
    shape = [len(devices) if name == along else 1 for name in mesh.axis_names]
    return Mesh(devices.reshape(shape), mesh.axis_names)
