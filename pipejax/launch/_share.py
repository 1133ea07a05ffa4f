"""What each process of a host is given: its place, its accelerator or its cores."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping

from ._place import check_address

LAUNCHED = "PIPEJAX_LAUNCHED"
"""The variable that says that a place was given by `pipejax launch`."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Processes on hosts that have as many of them as one another.

    Attributes:
      processes: of each host.
      hosts: how many.
      host: which this is, from 0.
      coordinator: `host:port` of the first host, which all others reach.

    Raises:
      ValueError: for counts below 1, a host that there is not, or an address without a
        port.
    """

    processes: int
    hosts: int
    host: int
    coordinator: str

    def __post_init__(self) -> None:
        for name in ("processes", "hosts"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be at least 1, got {getattr(self, name)}."
                )
        if not 0 <= self.host < self.hosts:
            raise ValueError(
                f"`host` must lie in [0, {self.hosts}), the number of hosts; got"
                f" {self.host}."
            )
        check_address("coordinator", self.coordinator, "the argument")

    def rank(self, local: int) -> int:
        """Of the n-th process of this host, among all."""
        return self.host * self.processes + local


def gpus(environ: Mapping[str, str]) -> int:
    """How many NVIDIA GPUs a process on this host sees."""
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return len([each for each in shown.split(",") if each not in ("", "-1")])
    return len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))


def cores(local: int, processes: int) -> set[int]:
    """The cores of a process: its share of those that this one may use.

    Args:
      local: which process of this host it is, from 0.
      processes: how many there are. Where they are more than the cores, some share one.
    """
    usable = sorted(os.sched_getaffinity(0))
    share = len(usable) // processes
    if not share:
        return {usable[local % len(usable)]}
    return set(usable[local * share : (local + 1) * share])


def accelerators(local: int, processes: int, there: int) -> range:
    """The numbers of a process's GPUs: its share of those that are there.

    Raises:
      ValueError: for processes among which they do not divide.
    """
    share, left = divmod(there, processes)
    if left or not share:
        raise ValueError(
            f"`processes` must divide the {there} GPUs of this host, got {processes}."
            " Show it others by CUDA_VISIBLE_DEVICES, or none by JAX_PLATFORMS=cpu."
        )
    return range(local * share, (local + 1) * share)


def environment(job: Job, local: int, gpus: int) -> dict[str, str]:
    """Variables of a process: its GPUs, or without any what suits its cores."""
    place = {
        "JAX_COORDINATOR_ADDRESS": job.coordinator,
        "JAX_NUM_PROCESSES": str(job.hosts * job.processes),
        "JAX_PROCESS_ID": str(job.rank(local)),
        "PYTHONUNBUFFERED": "1",
        LAUNCHED: "1",
    }
    if gpus:
        own = accelerators(local, job.processes, gpus)
        return place | {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, own))}
    return place | cpu_environment(len(cores(local, job.processes)))


def cpu_environment(count: int) -> dict[str, str]:
    """Variables that suit a process with `count` cores, to be set before it starts."""
    return {
        # XLA's threads: one computes, and one can wait for a socket.
        "NPROC": str(max(2, count)),
        "OMP_NUM_THREADS": str(count),
        # Large arrays come from huge pages: their page faults cost more than a codec.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
