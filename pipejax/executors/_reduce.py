"""The sum over devices as a program of its own, for the communication thread."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax.buckets import Buckets
from pipejax.message import MessageForm, fed_back, summed

from ._setting import Setting

# Buckets, the codecs' states, and what the buckets hold, to sums and states.
Reduce = Callable[[Buckets, Any, MessageForm], tuple[Buckets, Any]]


def make_reduce(setting: Setting, where: Mesh) -> Reduce:
    """The sum, on the mesh's own devices or by way of CPUs beside them."""
    if where is setting.mesh:
        return reduce_in_place(setting)
    return reduce_by_copy(setting, where)


def reduction_mesh(mesh: Mesh) -> Mesh:
    """Where the communication thread sums: a mesh of CPUs itself, or CPUs beside it."""
    return mesh if mesh.devices.flat[0].platform == "cpu" else _one_cpu_a_process(mesh)


def reduce_in_place(setting: Setting) -> Reduce:
    """From each device's own part of `{dtype: [p n]}` to the sum `{dtype: [n]}`.

    Returns when the sum is there, so that a failure is raised here.
    """
    own = P(setting.axis_name)

    def program(buckets: Buckets, states: Any, form: MessageForm) -> Any:
        def local(buckets: Buckets, before: Any) -> Any:
            total, after = summed(setting.reductions(form), buckets, before)
            return total, fed_back(form, total, True, after, before)

        return setting.on_mesh(local, (own, own), (P(), own))(buckets, states)

    compiled = jax.jit(program, static_argnums=2)

    def reduce(buckets: Buckets, states: Any, form: MessageForm) -> Any:
        return jax.block_until_ready(compiled(buckets, states, form))

    return reduce


def reduce_by_copy(setting: Setting, cpus: Mesh) -> Reduce:
    """The same by way of `cpus`, one device a process: copy out, sum, copy back.

    A process adds up its own devices' parts first, in their order.
    """
    mesh, axis = setting.mesh, setting.axis_name
    between = reduce_in_place(setting.at(cpus))
    (cpu,) = cpus.local_devices

    def out(bucket: jax.Array) -> jax.Array:
        shards = sorted(bucket.addressable_shards, key=lambda s: s.index[0].start or 0)
        copies = [np.asarray(shard.data) for shard in shards]
        own = jax.device_put(sum(copies[1:], start=copies[0]), cpu)
        return jax.make_array_from_single_device_arrays(
            (cpus.size * own.size,), NamedSharding(cpus, P(axis)), [own]
        )

    def back(total: jax.Array) -> jax.Array:
        own = total.addressable_data(0)
        return jax.make_array_from_single_device_arrays(
            own.shape,
            NamedSharding(mesh, P()),
            [jax.device_put(own, device) for device in mesh.local_devices],
        )

    def reduce(buckets: Buckets, states: Any, form: MessageForm) -> Any:
        copies = {k: out(v) for k, v in buckets.items()}
        totals, states = between(copies, states, form)
        return jax.block_until_ready({k: back(v) for k, v in totals.items()}), states

    return reduce


def _one_cpu_a_process(mesh: Mesh) -> Mesh:
    """A CPU device of each process that has devices in `mesh`, in their order."""
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
    # Of the devices of one process one is left, over the first axis.
    return Mesh(devices.reshape(-1, *(1,) * (mesh.devices.ndim - 1)), mesh.axis_names)
