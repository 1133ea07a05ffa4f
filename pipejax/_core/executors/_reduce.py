"""Sums messages over devices in a program of its own, for the communication thread."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Message, Reduced, averaging, valid_in_step
from pipejax._core.step import Trainable, data_specs
from pipejax._internal.mesh import AxisName, axes, on_mesh_by
from pipejax._internal.types import CodecStates, Tree

from ._by_shard import groups_in_processes, reduce_by_shard, sum_specs
from ._config import StepConfig

Reduce = Callable[[Message, Any], tuple[Reduced, Any]]
"""A function from a message and the codec states to the sum and the states after it."""


def make_reduce(config: StepConfig, where: Mesh) -> Reduce:
    """Returns a function that sums messages over devices.

    Args:
      where: The mesh that sums, as `Executor.reduction_mesh` returns it: that of the
        step, or CPUs beside it.

    Returns:
      A function from a message and the codec states to the sum and the codec states
      after it. It waits for the sum. The `arrived` of the sum is always true.
    """
    if where is not config.mesh:
        return reduce_by_copy(config, where)
    if groups_in_processes(where, config.axis_name):
        return reduce_by_shard(config)
    return reduce_on_mesh(config)


def reduction_mesh(mesh: Mesh, axis_name: AxisName) -> Mesh:
    """Returns the mesh on which the communication thread sums.

    Args:
      axis_name: The mesh axis of the data, or a tuple of such axes.

    Returns:
      `mesh` if it consists of CPUs, or else a mesh of CPUs beside its devices.
    """
    if mesh.devices.flat[0].platform == "cpu":
        return mesh
    return _one_cpu_a_process(mesh, axis_name)


def reduce_on_mesh(config: StepConfig) -> Reduce:
    """Returns a function that sums each device's part of a message, on the mesh itself.

    The function waits for the sum, so that it raises the error if the reduction fails.
    """
    own = P(config.axis_name)

    def local(message: Message, before: Tree) -> Any:
        # `Host` replaces this value, and drops codec states that follow from zeros.
        arrived = jnp.array(True)
        exchange = averaging(message, arrived, config.sums_by, config.axis_name)
        return exchange.run(before)

    compiled = jax.jit(config.on_mesh(local, (own, own), (P(), own)))

    def reduce(message: Message, states: CodecStates) -> Any:
        return jax.block_until_ready(compiled(message, states))

    return reduce


ExchangeAndWait = Callable[[Trainable, Message, Any, jax.Array], tuple[Reduced, Any]]
"""A function from what the exchange updates, the message, the codec states and the
number of real messages in the queue to the reduced message and the codec states."""


def make_update(config: StepConfig, age: int) -> ExchangeAndWait:
    """Returns a function that exchanges a message and updates pieces in between.

    It waits for the result.

    Args:
      age: The place of the message in the queue. 0 is the oldest.
    """
    own, axis = P(config.axis_name), config.axis_name
    whole: Any = P()

    def update(
        trained: Trainable, message: Message, before: Tree, filled: jax.Array
    ) -> tuple[Reduced, Any]:
        real = valid_in_step(filled, config.width - 1, age)
        exchange = config.step.exchange(trained, message, real, config.sums_by)
        return exchange.run(before)

    def specs(trained: Trainable, *_: Any) -> tuple[Any, Any]:
        pieces = data_specs(trained, axis)
        reduced = Reduced(whole, whole, whole, pieces)
        return (pieces, own, own, own), (reduced, own)

    program = jax.jit(on_mesh_by(specs, update, config.mesh, axis))
    return lambda *args: jax.block_until_ready(program(*args))


def make_gather(config: StepConfig) -> Callable[[Trainable], Trainable]:
    """Returns a function that gathers parameters as they are, and waits for them."""
    step, axis = config.step, config.axis_name

    def gather(trained: Trainable) -> Trainable:
        assert step.gather is not None
        return step.gather(trained, config.sums_by)

    def specs(trained: Trainable) -> tuple[Any, Any]:
        pieces = data_specs(trained, axis)
        return (pieces,), pieces

    program = jax.jit(on_mesh_by(specs, gather, config.mesh, axis))
    return lambda trained: jax.block_until_ready(program(trained))


def reduce_by_copy(config: StepConfig, cpus: Mesh) -> Reduce:
    """Returns a function that sums on `cpus`: it copies out, sums, and copies back.

    `cpus` has one device for each process. A process first adds up the parts of its own
    devices or groups, in their order. If it has only some of the shards of a group, it
    sends zeros in place of the others.
    """
    mesh, axis = config.mesh, config.axis_name
    between = reduce_on_mesh(config.at(cpus))
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

    def reduce(message: Message, states: CodecStates) -> Any:
        # Starts all copies before `out` waits for any. One at a time, they take longer.
        for array in jax.tree.leaves(message):
            array.copy_to_host_async()
        total, states = between(jax.tree.map(out, message), states)
        return jax.block_until_ready(
            jax.tree.map(back, total, sum_specs(total))
        ), states

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
