"""Exchanges between TPU slices.

A program for several slices is compiled for each of them, and its `num_partitions` are
the devices of one. What crosses slices is a `send` to the host and a `recv` from it;
the runtime on the hosts ("Megascale") does the rest, as their attributes say:

- `_xla_megascale_transfer_type="ALL_REDUCE"`: which collective
- `_xla_megascale_target="{1,2}x{0:3}"`: devices 0 to 3 of slice 1, each with the one
  of slice 2 that has the same number. It is missing where not all slices form one
  group, and from an all-to-all or a permute: the text does not say who takes part.
- `_xla_host_transfer_rendezvous="psum.7_0"`: joins a `send` to its `recv`
"""

import re
from typing import NamedTuple

from ._hlo import Instruction

_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_NUMBERS = r"\{(\d+(?::\d+)?(?:,\d+(?::\d+)?)*)\}"


class Target(NamedTuple):
    """Who takes part.

    Attributes:
      slices: numbers of slices, from 1.
      devices: numbers of devices of a slice; each exchanges with those of the same
        number.
    """

    slices: tuple[int, ...]
    devices: tuple[int, ...]


def between_slices(op: Instruction) -> bool:
    """Whether this `send` or `recv` is half of an exchange between slices."""
    half = op.opcode in ("send", "recv")
    return half and "_xla_megascale_transfer_type" in op.frontend


def kind(op: Instruction) -> str:
    """Which collective the exchange is."""
    written = op.frontend["_xla_megascale_transfer_type"]
    if written not in _KINDS:
        op.refuse("an exchange between slices of an unknown type")
    return _KINDS[written]


def rendezvous(op: Instruction) -> str:
    """What a `send` and its `recv` have in common."""
    if "_xla_host_transfer_rendezvous" not in op.frontend:
        op.refuse("nothing joins it to its other half")
    return op.frontend["_xla_host_transfer_rendezvous"]


def target(op: Instruction) -> Target | None:
    """Who takes part, if the text says so."""
    written = op.frontend.get("_xla_megascale_target")
    if written is None:
        return None
    both = re.fullmatch(f"{_NUMBERS}x{_NUMBERS}", written)
    if not both:
        op.refuse("an exchange between slices with an unknown target")
    return Target(_numbers(both[1]), _numbers(both[2]))


def _numbers(text: str) -> tuple[int, ...]:
    """Of a list such as `0:3,8`, whose ends are included."""
    ends = [[int(n) for n in piece.split(":")] for piece in text.split(",")]
    return tuple(n for pair in ends for n in range(pair[0], pair[-1] + 1))
