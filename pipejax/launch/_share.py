"""The share of a host that each of its processes gets: place, GPUs or CPU cores."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping

from pipejax._internal.threads import configured_devices, needed

from ._place import check_address

LAUNCHED = "PIPEJAX_LAUNCHED"
"""The variable that marks a process that `pipejax launch` has started."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A job with the same number of processes on each of its hosts."""

    processes: int  # on each host
    hosts: int
    host: int  # the number of this host, from 0 to `hosts - 1`
    coordinator: str  # the address of host 0, which all other hosts can reach

    def __post_init__(self) -> None:
        for name in ("processes", "hosts"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be at least 1, got {getattr(self, name)}."
                )
        if not 0 <= self.host < self.hosts:
            raise ValueError(
                f"`host` must lie in [0, {self.hosts}), since the number of hosts is"
                f" {self.hosts}; got {self.host}."
            )
        check_address("coordinator", self.coordinator, "the argument")

    def rank(self, local: int) -> int:
        return self.host * self.processes + local


def gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of NVIDIA GPUs that a process on this host sees."""
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return len([each for each in shown.split(",") if each not in ("", "-1")])
    return len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))


def cores(local: int, processes: int) -> set[int]:
    usable = sorted(os.sched_getaffinity(0))
    share = len(usable) // processes
    if not share:
        # With more processes than cores, each gets one core, and some share theirs.
        return {usable[local % len(usable)]}
    return set(usable[local * share : (local + 1) * share])


def accelerators(local: int, processes: int, there: int) -> range:
    share, left = divmod(there, processes)
    if left or not share:
        raise ValueError(
            f"`processes` must divide the {there} GPUs of this host, got {processes}."
            " Choose GPUs by CUDA_VISIBLE_DEVICES, or use none by JAX_PLATFORMS=cpu."
        )
    return range(local * share, (local + 1) * share)


def environment(job: Job, local: int, gpus: int) -> dict[str, str]:
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
    """Returns environment variables that suit a process with `count` CPU cores."""
    # Most of these take effect only if they are set before the process starts.
    return {
        # The number of XLA's threads, for the devices that the environment asks for.
        # `initialize` raises it if the program asks for more.
        "NPROC": str(max(needed(configured_devices()), count)),
        "OMP_NUM_THREADS": str(count),
        # Huge pages for large arrays: faults of small pages cost more than a codec.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
