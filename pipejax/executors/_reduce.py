"""The sum over devices as a program of its own, for the communication thread."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax.buckets import Buckets
from pipejax.collectives import run
from pipejax.mesh import on_mesh

from ._setting import Setting

Reduce = Callable[[Buckets, dict[str, int]], Buckets]


def make_reduce(setting: Setting, in_place: bool = False) -> Reduce:
    """The sum, on the devices themselves where they are CPUs, else by way of CPUs."""
    if in_place or setting.mesh.devices.flat[0].platform == "cpu":
        return reduce_in_place(setting)
    return reduce_by_copy(setting, _one_cpu_a_process(setting.mesh))


def reduce_in_place(setting: Setting) -> Reduce:
    """From each device's own part of `{dtype: [p n]}` to the sum `{dtype: [n]}`.

    The second argument says how many elements of each bucket are gradients. Returns
    when the sum is there, so that a failure is raised here.
    """
    axis = setting.axis_name

    def program(buckets: Buckets, gradients: tuple[tuple[str, int], ...]) -> Buckets:
        def local(own: Buckets) -> Buckets:
            reductions = setting.reductions(own, dict(gradients))
            return {name: run(reductions[name], x) for name, x in own.items()}

        return on_mesh(local, setting.mesh, P(axis), P())(buckets)

    compiled = jax.jit(program, static_argnums=1)

    def reduce(buckets: Buckets, gradients: dict[str, int]) -> Buckets:
        return jax.block_until_ready(compiled(buckets, tuple(gradients.items())))

    return reduce


def reduce_by_copy(setting: Setting, cpus: Mesh) -> Reduce:
    """The same by way of `cpus`, one device a process: copy out, sum, copy back.

    A process adds up its own devices' parts first, in their order.
    """
    mesh, axis = setting.mesh, setting.axis_name
    between = reduce_in_place(dataclasses.replace(setting, mesh=cpus))
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

    def reduce(buckets: Buckets, gradients: dict[str, int]) -> Buckets:
        totals = between({k: out(v) for k, v in buckets.items()}, gradients)
        return jax.block_until_ready({k: back(v) for k, v in totals.items()})

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
    return Mesh(np.array([cpus[process] for process in processes]), mesh.axis_names)
