"""Where a process stands among all that train together."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Place:
    """Which of how many, and where they meet.

    Attributes:
      launcher: who said so: "torchrun", "Slurm", ...
      coordinator: `host:port`, at which process 0 waits for the others.
      processes: how many.
      rank: which of them this is, from 0.
      devices: numbers of this process's accelerators among those that it sees; `None`
        is all.

    Raises:
      ValueError: for an address without a port, or a rank that there is not.
    """

    launcher: str
    coordinator: str
    processes: int
    rank: int
    devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_address("coordinator", self.coordinator, self.launcher)
        if not 0 <= self.rank < self.processes:
            raise ValueError(
                f"`rank` must lie in [0, {self.processes}), the number of processes;"
                f" got {self.rank} ({self.launcher})."
            )


def check_address(name: str, address: str, said_by: str) -> str:
    """`address`, if it is `host:port`, else a ValueError."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(
            f"`{name}` must be host:port, got {address!r} ({said_by}). Give an address"
            " of the host of process 0, and a port that is free there."
        )
    return address
