"""Sums messages on CPUs beside accelerators."""

import collections
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Mark, Message, Reduced, Valid
from pipejax._internal.mesh import AxisName, axes, processes_of_groups
from pipejax._internal.ranges import headroom, is_narrow
from pipejax._internal.types import CodecStates

from ._by_shard import sum_specs
from ._config import StepConfig


def reduction_mesh(mesh: Mesh, axis_name: AxisName) -> Mesh:
    """Returns the mesh on which the communication thread sums."""
    if mesh.devices.flat[0].platform == "cpu":
        return mesh
    return _one_cpu_a_process(mesh, axis_name)


def exchange_by_copy(
    config: StepConfig, cpus: Mesh, between: Callable[..., tuple[Reduced, CodecStates]]
) -> Callable[..., tuple[Reduced, CodecStates]]:
    """Returns a function that copies a message out, sums it, and copies the sum back.

    `cpus` has one device for each process. A process first adds up the parts of its own
    devices or groups, in their order. If it has only some of the shards of a group, it
    sends zeros in place of the others.
    """
    mesh, axis = config.mesh, config.axis_name
    (cpu,) = cpus.local_devices
    # The devices of a host may have the same message, which counts for all of them.
    copies = config.devices // config.messages
    # A process sums this many parts at most, before the exchange of all processes.
    groups = processes_of_groups(mesh, config.message_axes)
    parts = collections.Counter(itertools.chain(*groups))
    scale = headroom(copies * max(parts.values()))

    def out(array: jax.Array, scale: float) -> jax.Array:
        parts = _by_group(array, config.messages)
        if copies != scale:
            parts = [part * part.dtype.type(copies / scale) for part in parts]
        own = jax.device_put(sum(parts[1:], start=parts[0]), cpu)
        shape = (cpus.size * own.shape[0], *own.shape[1:])
        return jax.make_array_from_single_device_arrays(
            shape, NamedSharding(cpus, P(axis)), [own]
        )

    def placed(array: Any) -> jax.Array:
        # A state that was read from bytes has arrays of NumPy.
        if isinstance(array, jax.Array):
            return array
        return jax.device_put(array, NamedSharding(mesh, config.message_spec))

    def back(total: jax.Array, spec: P, factor: Any) -> jax.Array:
        own, sharding = np.asarray(total.addressable_data(0)), NamedSharding(mesh, spec)
        own = own if np.all(factor == 1) else own * np.float32(factor)
        places = sharding.addressable_devices_indices_map(own.shape)
        return jax.make_array_from_single_device_arrays(
            own.shape,
            sharding,
            [jax.device_put(own[index], device) for device, index in places.items()],
        )

    def exchange(
        trained: None,
        message: Message,
        states: CodecStates,
        valid: Valid,
        mark: Mark = None,
    ) -> tuple[Reduced, CodecStates]:
        with jax.transfer_guard("allow"):  # the user has chosen this executor
            # Starts all copies before `out` waits for any. One at a time, they take
            # longer.
            message = jax.tree.map(placed, message)
            for array in jax.tree.leaves(message):
                for shard in _sent(array):
                    shard.data.copy_to_host_async()
            scales = _scales(message, scale, narrow=config.all_reduce.narrow)
            own = jax.tree.map(out, message, scales)
        total, states = between(trained, own, states, valid, mark)
        total = jax.tree.map(back, total, sum_specs(total), _factors(scales))
        return jax.block_until_ready(total), states

    return exchange


def _scales(message: Message, scale: float, *, narrow: bool) -> Any:
    """Returns by what each array of a message is divided before parts are added up.

    A codec with a narrow range knows of the processes alone.
    """
    scales = jax.tree.map(lambda x: scale if is_narrow(x.dtype) else 1.0, message)
    if not narrow:
        return scales
    return scales._replace(gradients=jax.tree.map(lambda _: scale, scales.gradients))


def _factors(scales: Any) -> Reduced:
    """Returns by what each array of a reduced message is multiplied."""
    squares: Any = np.square(jax.tree.leaves(scales.gradients))
    whole: Any = 1.0
    return Reduced(scales, whole, whole, squares)


def _by_group(array: jax.Array, count: int) -> list[np.ndarray]:
    """Returns the part of each group that has shards in this process, in order."""
    length = array.shape[0] // count
    if not array.size:  # is replicated
        return [np.zeros((length, *array.shape[1:]), array.dtype)]
    groups: dict[int, np.ndarray] = {}
    for shard in sorted(array.addressable_shards, key=lambda s: s.index[0].start or 0):
        start = shard.index[0].start or 0
        group, first = divmod(start, length)
        shape = (length, *array.shape[1:])
        if group not in groups:
            groups[group] = np.zeros(shape, array.dtype)
        if shard.replica_id == 0 and shard.data.shape == shape:
            groups[group] = np.asarray(shard.data)
        elif shard.replica_id == 0:
            rows = slice(first, first + shard.data.shape[0])
            groups[group][(rows, *shard.index[1:])] = np.asarray(shard.data)
    return list(groups.values())


def _sent(array: jax.Array) -> list[Any]:
    """Returns the shards that this process sends.

    Other devices, also those of other processes, may have copies of the same part.
    """
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


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
