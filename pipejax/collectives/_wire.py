"""What a collective moves."""

from typing import NamedTuple


class Transfer(NamedTuple):
    """One collective, as a program's text has it.

    Attributes:
      kind: `"all-reduce"`, `"all-to-all"`, `"all-gather"` or `"collective-permute"`.
      devices: p, that exchange with each other.
      bytes: n, what a device hands over.
    """

    kind: str
    devices: int
    bytes: int

    @property
    def wire_bytes(self) -> float:
        """What the busiest device must send; see `wire_bytes`."""
        return wire_bytes(self.kind, self.devices, self.bytes)


def wire_bytes(kind: str, devices: int, payload: float) -> float:
    """What one of `devices` p must send of a `payload` of n bytes, at best.

    - all-reduce: `2 (p-1)/p n`
    - reduce-scatter, all-to-all: `(p-1)/p n`
    - all-gather: `(p-1) n`, which is `(p-1)/p` of its output
    - permute, broadcast, send: `n`; recv: 0

    >>> wire_bytes("all-reduce", 4, 100.0)
    150.0
    """
    if devices <= 1 or kind == "recv":
        return 0.0
    factor = {
        "all-reduce": 2 * (devices - 1) / devices,
        "reduce-scatter": (devices - 1) / devices,
        "all-to-all": (devices - 1) / devices,
        "ragged-all-to-all": (devices - 1) / devices,
        "all-gather": devices - 1,
    }
    return factor.get(kind, 1) * payload
