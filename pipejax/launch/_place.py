"""The place of a process in its job: its rank, and where the processes meet."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Place:
    """The rank of a process in its job, and the address at which all processes meet.

    Attributes:
      launcher: The source of the place, such as "torchrun", "Slurm", "arguments" (those
        of `initialize`) or "JAX_NUM_PROCESSES".
      coordinator: The address `host:port` at which process 0 waits for the others.
      processes: The number of processes in the job.
      rank: The number of this process, from 0 to `processes - 1`.
      devices: The accelerators of this process, as numbers among those that it sees.
        `None` means all of them.

    Raises:
      ValueError: If `coordinator` is not `host:port`, or if `rank` is not in
        `[0, processes)`.
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
                f"`rank` must lie in [0, {self.processes}), since there are"
                f" {self.processes} processes; got {self.rank} ({self.launcher})."
            )


def check_address(name: str, address: str, said_by: str) -> str:
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(
            f"`{name}` must be host:port, got {address!r} ({said_by}). Give an address"
            " of the host of process 0, and a port that is free there."
        )
    return address
