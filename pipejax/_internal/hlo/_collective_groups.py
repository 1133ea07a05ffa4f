"""Lists which devices exchange data in each of a program's collectives."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ._collectives import is_collective, kind_of
from ._device_groups import by_slice, device_groups
from ._parse import parse


class CollectiveGroups(NamedTuple):
    """A collective of a program, and the devices that exchange data in it.

    Attributes:
      kind: Kind of the collective, as in `Collective.kind`.
      groups: Sets of devices that exchange data with one another. In a permute, devices
        are in one set if its pairs connect them, directly or through other devices.
      op_name: JAX operation that the collective comes from; empty if the program does
        not name it.
      line: The instruction, as printed in the text of the program.
    """

    kind: str
    groups: tuple[frozenset[Any], ...]
    op_name: str
    line: str

    @property
    def crosses_processes(self) -> bool:
        """Returns whether the devices of any group belong to more than one process."""
        return any(len({d.process_index for d in group}) > 1 for group in self.groups)


def collective_groups(
    program: jax.stages.Compiled | str, devices: jax.sharding.Mesh | Sequence[Any]
) -> tuple[CollectiveGroups, ...]:
    """Lists a program's collectives, each with the sets of devices that exchange data.

    Each instruction is listed once, however often it runs, also those in loops and in
    all branches. In a program for several TPU slices, a collective inside a slice is
    listed with the groups of every slice, even if only some slices take its branch.

    Use it to check where a program communicates, for example that a collective stays
    inside a process. Unlike `inspect`, it does not need a scheduled program.

    Args:
      program: A compiled program, or the text of one, scheduled or not.
      devices: The devices that the program is compiled for: a mesh, or a sequence of
        devices in the order of the mesh.

    Returns:
      A `CollectiveGroups` for each collective, in the order of the text.

    Raises:
      ValueError: If the program is compiled for another number of devices, if its text
        is not understood, or if the text does not say which devices take part in a
        collective.

    Examples:
      An all-reduce inside each half of four devices, for which numbers stand here:

      >>> text = '''HloModule step, replica_count=4
      ... ENTRY %main (x: f32[8]) -> f32[8] {
      ...   %x = f32[8] parameter(0)
      ...   ROOT %sum = f32[8] all-reduce(%x), replica_groups={{0,1},{2,3}}
      ... }'''
      >>> (found,) = collective_groups(text, devices=[0, 1, 2, 3])
      >>> found.kind, found.groups
      ('all-reduce', (frozenset({0, 1}), frozenset({2, 3})))
    """
    text = program if isinstance(program, str) else program.as_text() or ""
    module = parse(text.strip())
    if isinstance(devices, jax.sharding.Mesh):
        devices = devices.devices.flatten().tolist()
    slices = by_slice(list(devices), module)
    return tuple(
        CollectiveGroups(
            kind_of(op), device_groups(op, module, slices), op.op_name, op.line
        )
        for home in module.computations.values()
        for op in home.instructions
        if is_collective(op)
    )
