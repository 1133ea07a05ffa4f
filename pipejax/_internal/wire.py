"""The size of what a collective moves."""

from typing import NamedTuple


class Transfer(NamedTuple):
    """The data that one collective moves, as in the text of a compiled program.

    Attributes:
      kind: XLA's name of the collective. The algorithms of `pj.collectives` have
        `"all-reduce"`, `"reduce-scatter"`, `"all-to-all"`, `"all-gather"` and
        `"collective-permute"`.
      devices: Number of devices that send to each other.
      bytes: Size in bytes of the operand of the collective on one device.

    Examples:
      >>> from pipejax.collectives import Transfer
      >>> Transfer("all-reduce", devices=4, bytes=100).wire_bytes
      150.0
    """

    kind: str
    devices: int
    bytes: int

    @property
    def wire_bytes(self) -> float:
        """Returns the bytes that the busiest device must send at least.

        They are `pj.collectives.wire_bytes(kind, devices, bytes)`.
        """
        return wire_bytes(self.kind, self.devices, self.bytes)


def wire_bytes(kind: str, devices: int, payload: float) -> float:
    """Returns the bytes that the busiest device must send at least in one collective.

    With p = `devices` and n = `payload`, they are `2 (p-1)/p n` for an all-reduce,
    `(p-1)/p n` for a reduce-scatter or an all-to-all, `(p-1) n` for an all-gather, 0
    for a recv and on one device, and n for any other collective.

    Args:
      kind: Kind of the collective, with the name that XLA gives it.
      devices: Number of devices that send to each other.
      payload: Size in bytes of the operand of the collective on one device.

    Examples:
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
