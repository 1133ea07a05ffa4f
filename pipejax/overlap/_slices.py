"""Exchanges between TPU slices.

A program for several slices is compiled for each of them, and its `num_partitions` are
the devices of one. What crosses slices is a `send` to the host and a `recv` from it;
the runtime on the hosts ("Megascale") does the rest, as their attributes say:

- `_xla_megascale_transfer_type="ALL_REDUCE"`: which collective
- `_xla_megascale_target={{100000,200000},{100001,200001}}`: who takes part, by the `id`
  of devices, which is 100,000 for each slice from 1 and a number in that slice. Short
  for it is `"{1,2}x{0:1}"`: of slices 1 and 2 those that have the same number, 0 to 1.
- `_xla_megascale_target={{100000->200000},{200000->100000}}`: who sends to whom
- `_xla_host_transfer_rendezvous="psum.7_0"`: joins a `send` to its `recv`
"""

import re

from ._groups import Group, connected
from ._hlo import Instruction

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
    """Tells whether `op` is one half of an exchange between slices."""
    half = op.opcode in ("send", "recv")
    return half and "_xla_megascale_transfer_type" in op.frontend


def kind(op: Instruction) -> str:
    """Returns the kind of collective that the exchange is."""
    written = op.frontend["_xla_megascale_transfer_type"]
    if written not in _KINDS:
        op.refuse("an exchange between slices of an unknown type")
    return _KINDS[written]


def rendezvous(op: Instruction) -> str:
    """Returns the key that a `send` and its `recv` have in common."""
    if "_xla_host_transfer_rendezvous" not in op.frontend:
        op.refuse("nothing joins it to its other half")
    return op.frontend["_xla_host_transfer_rendezvous"]


def groups_by_id(op: Instruction) -> tuple[Group, ...]:
    """Returns sets of devices that exchange data, by their `id`."""
    written = op.frontend.get("_xla_megascale_target", "")
    if both := re.fullmatch(f"{_SPANS}x{_SPANS}", written):
        slices, numbers = _numbers(both[1]), _numbers(both[2])
        return tuple(frozenset(_STRIDE * s + n for s in slices) for n in numbers)
    if not re.fullmatch(rf"\{{{_LIST}(?:,{_LIST})*\}}", written):
        op.refuse("an exchange between slices, and its target is not known")
    listed = [
        frozenset(map(int, re.findall(r"\d+", group)))
        for group in re.findall(_LIST, written)
    ]
    return tuple(connected(listed)) if "->" in written else tuple(listed)


def _numbers(text: str) -> list[int]:
    """Expands a list such as `0:3,8`, whose ends are included."""
    ends = [[int(n) for n in piece.split(":")] for piece in text.split(",")]
    return [n for pair in ends for n in range(pair[0], pair[-1] + 1)]
