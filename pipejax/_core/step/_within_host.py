"""Averages the gradients of the devices of a host, before they predict by them.

A device predicts the mean gradient of all devices by its own. The average over a host
with d devices is a better guess: its noise is that of d times as many examples. The
mean over all devices stays the same.
"""

import dataclasses

import jax
from jax import lax
from jax.sharding import Mesh

from pipejax._core.message import Message
from pipejax._internal.mesh import AxisName, axes, processes_of_groups
from pipejax._internal.ravel import working_dtype


def device_axis(mesh: Mesh, axis_name: AxisName) -> str | None:
    """Returns the mesh axis of the devices of a host, if `axis_name` has one.

    It is the second of two names, in the order of the mesh. With a single host, its
    devices would exchange everything before they predict, and nothing would be left to
    hide. CPUs of several processes have none: a collective between them would run
    beside the communication thread.
    """
    names = axes(axis_name)
    two = len(names) == 2 and [x for x in mesh.axis_names if x in names] == [*names]
    if not two or 1 in (mesh.shape[name] for name in names):
        return None
    if mesh.devices.flat[0].platform != "cpu":
        return names[1]
    others = tuple(name for name in mesh.axis_names if name != names[1])
    within = all(len(x) == 1 for x in processes_of_groups(mesh, others))
    return names[1] if within else None


def averaged_within_host(message: Message, axis: str) -> Message:
    """Returns the mean of the messages of the devices of a host."""

    def mean(x: jax.Array) -> jax.Array:
        return lax.pmean(x.astype(working_dtype(x.dtype)), axis).astype(x.dtype)

    passengers = message.passengers
    values = lax.pmean(passengers.values, axis)
    return message._replace(
        gradients=jax.tree.map(mean, message.gradients),
        changes=jax.tree.map(mean, message.changes),
        passengers=dataclasses.replace(passengers, values=values),
    )
