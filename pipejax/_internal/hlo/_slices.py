"""Reads collectives between TPU slices.

A program for several slices is compiled for each slice, and its `num_partitions` counts
the devices of one slice. A collective between slices appears in it as a `send` to the
host and a `recv` from the host. The runtime on the hosts ("Megascale") does the rest.
Frontend attributes of the two instructions describe the collective:

- `_xla_megascale_transfer_type="ALL_REDUCE"`: the kind of collective.
- `_xla_megascale_target={{100000,200000},{100001,200001}}`: the groups of devices that
  exchange data, by the `id` of a device. The `id` is 100,000 times the number of the
  slice, counted from 1, plus the number of the device in its slice.
- `_xla_megascale_target="{1,2}x{0:1}"`: a short form of the same groups. Devices of
  slices 1 and 2 that have the same number form a group, for the numbers 0 to 1.
- `_xla_megascale_target={{100000->200000},{200000->100000}}`: pairs of a sender and a
  receiver.
- `_xla_host_transfer_rendezvous="psum.7_0"`: a key that a `send` and its `recv` share.
"""

import re

from ._groups import Group, connected
from ._module import Instruction

_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_STRIDE = 100_000
_SPANS = r"\{(\d+(?::\d+)?(?:,\d+(?::\d+)?)*)\}"
_LIST = r"\{\d+(?:(?:,|->)\d+)*\}"


def between_slices(op: Instruction) -> bool:
    """Returns whether `op` is one half of a collective between slices."""
    half = op.opcode in ("send", "recv")
    return half and "_xla_megascale_transfer_type" in op.frontend


def kind(op: Instruction) -> str:
    written = op.frontend["_xla_megascale_transfer_type"]
    if written not in _KINDS:
        op.refuse("it is a collective between slices of an unknown type")
    return _KINDS[written]


def rendezvous(op: Instruction) -> str:
    """Returns the key that a `send` and the `recv` of one collective share."""
    if "_xla_host_transfer_rendezvous" not in op.frontend:
        op.refuse("it has no rendezvous key that leads to its other half")
    return op.frontend["_xla_host_transfer_rendezvous"]


def groups_by_id(op: Instruction) -> tuple[Group, ...]:
    """Returns the sets of devices that exchange data, by the `id` of each device."""
    written = op.frontend.get("_xla_megascale_target", "")
    if both := re.fullmatch(f"{_SPANS}x{_SPANS}", written):
        slices, numbers = _numbers(both[1]), _numbers(both[2])
        return tuple(frozenset(_STRIDE * s + n for s in slices) for n in numbers)
    if not re.fullmatch(rf"\{{{_LIST}(?:,{_LIST})*\}}", written):
        op.refuse("it is a collective between slices whose target has an unknown form")
    listed = [
        frozenset(map(int, re.findall(r"\d+", group)))
        for group in re.findall(_LIST, written)
    ]
    return tuple(connected(listed)) if "->" in written else tuple(listed)


def _numbers(text: str) -> list[int]:
    """Expands a list of numbers and ranges; both ends of a range are included."""
    ends = [[int(n) for n in piece.split(":")] for piece in text.split(",")]
    return [n for pair in ends for n in range(pair[0], pair[-1] + 1)]
