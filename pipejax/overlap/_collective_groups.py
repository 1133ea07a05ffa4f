"""Lists which devices exchange data in each of a program's collectives."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from . import _slices
from ._collectives import is_collective, kind_of
from ._groups import groups_of
from ._hlo import Instruction, Module, not_understood
from ._parse import parse


class CollectiveGroups(NamedTuple):
    """One collective of a program, with the devices that exchange data in it.

    Attributes:
      kind: as that of a `Collective`.
      groups: sets of devices that exchange data with one another. The pairs of a
        permute connect its devices to such sets.
      op_name: the JAX operation that it comes from.
      line: the instruction, as the program's text has it.
    """

    kind: str
    groups: tuple[frozenset[Any], ...]
    op_name: str
    line: str

    @property
    def crosses_processes(self) -> bool:
        """Tells whether the devices of any group belong to more than one process."""
        return any(len({d.process_index for d in group}) > 1 for group in self.groups)


def collective_groups(
    program: jax.stages.Compiled | str, devices: jax.sharding.Mesh | Sequence[Any]
) -> tuple[CollectiveGroups, ...]:
    """Lists a program's collectives, each with the sets of devices that exchange data.

    Each instruction is listed once, however often it runs. Instructions in loops and in
    all branches are listed too. In a program for several TPU slices, an exchange inside
    a slice is listed with the groups of every slice, even if only some slices take its
    branch. The program need not be scheduled.

    Args:
      program: compiled, or the text of it.
      devices: what it is compiled for: the mesh, or its devices in the mesh's order.

    Returns:
      The collectives, in the order of the text.

    Raises:
      ValueError: for `devices` that are not as many as the program has, and for text
        that is not understood, or does not say which devices take part.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    >>> collective_groups(compiled, mesh)
    ()
    """
    text = program if isinstance(program, str) else program.as_text() or ""
    module = parse(text.strip())
    if isinstance(devices, jax.sharding.Mesh):
        devices = devices.devices.flatten().tolist()
    slices = _by_slice(list(devices), module)
    return tuple(
        CollectiveGroups(kind_of(op), _devices(op, module, slices), op.op_name, op.line)
        for home in module.computations.values()
        for op in home.instructions
        if is_collective(op)
    )


def _by_slice(devices: list[Any], module: Module) -> list[list[Any]]:
    """Splits devices by slice if the program is compiled for several."""
    count = module.replica_count * module.num_partitions
    if len(devices) == count:
        return [devices]
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    if any(len(one) != count for one in slices.values()):
        raise ValueError(
            f"`devices` must be the {count} that the program is compiled for, or that"
            f" many of each slice; got {len(devices)}. Pass the mesh of its shardings."
        )
    return list(slices.values())


def _devices(
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
