"""Finds the devices that exchange data in a collective, and the mesh axes they span."""

from typing import Any

import jax
import numpy as np

from . import _slices
from ._groups import groups_of
from ._module import Instruction, Module, not_understood


def by_slice(devices: list[Any], module: Module) -> list[list[Any]]:
    """Returns the devices of each slice that a program is compiled for."""
    count = module.replica_count * module.num_partitions
    slices = _slices_of(devices, count)
    if not _are_all(count, slices):
        raise ValueError(
            f"`devices` must be the {count} devices that the program is compiled for,"
            f" or {count} devices of each slice; got {len(devices)} devices. Pass the"
            " mesh of the program's shardings."
        )
    return slices


def is_mesh_of(mesh: jax.sharding.Mesh, module: Module) -> bool:
    """Returns whether a mesh may have the devices that a program is compiled for."""
    count = module.replica_count * module.num_partitions
    return _are_all(count, _slices_of(mesh.devices.flatten().tolist(), count))


def _slices_of(devices: list[Any], count: int) -> list[list[Any]]:
    if len(devices) == count:
        return [devices]
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    return list(slices.values())


def _are_all(count: int, slices: list[list[Any]]) -> bool:
    return all(len(one) == count for one in slices)


def device_groups(
    op: Instruction, module: Module, slices: list[list[Any]]
) -> tuple[frozenset[Any], ...]:
    if not _slices.between_slices(op):
        return tuple(
            frozenset(devices[i] for i in group)
            for group in groups_of(op, module)
            for devices in slices
        )
    by_id = {device.id: device for one in slices for device in one}
    groups = _slices.groups_by_id(op)
    if missing := frozenset().union(*groups) - by_id.keys():
        raise not_understood(op.line, f"`devices` lacks the ids {sorted(missing)}")
    return tuple(frozenset(by_id[i] for i in group) for group in groups)


class MeshAxes:
    """The axes of the mesh that a program is compiled for."""

    def __init__(self, mesh: jax.sharding.Mesh, module: Module):
        self.names = tuple(mesh.axis_names)
        self._module = module
        self._slices = by_slice(mesh.devices.flatten().tolist(), module)
        self._places = {device: at for at, device in np.ndenumerate(mesh.devices)}

    def of(self, op: Instruction) -> tuple[str, ...]:
        """Returns the axes along which the devices of a group of `op` differ."""
        spanned = np.zeros(len(self.names), bool)
        for group in device_groups(op, self._module, self._slices):
            places = np.array([self._places[device] for device in group])
            # An axis is spanned if some device of a group has another place on it than
            # the first.
            spanned |= (places != places[:1]).any(axis=0)
        return tuple(np.array(self.names)[spanned].tolist())
