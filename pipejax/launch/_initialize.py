"""Joins a process to all others."""

import logging

import jax

from ._detect import detect
from ._place import Place

_log = logging.getLogger("pipejax")


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
    *,
    devices: tuple[int, ...] | None = None,
    timeout: float = 300.0,
) -> Place | None:
    """Joins this process to the others of its job, as its launcher says.

    To be called before anything else asks JAX for a device. `jax.distributed` does the
    work; what launchers it knows, and which it is told, see `pj.launch.detect`.

    Args:
      coordinator: `host:port` at which process 0 waits, by hand; then also
        `processes` and `rank`.
      processes: how many.
      rank: which of them this is, from 0.
      devices: numbers of the accelerators that are this process's, in place of those
        that its launcher gives it.
      timeout: seconds to wait for the others.

    Returns:
      Where this process stands; `None` without a launcher, and nothing was done.

    Raises:
      ValueError: for some of the three arguments without the others, or variables that
        say nothing, or two things.
    """
    given = (coordinator, processes, rank)
    if any(value is not None for value in given):
        if coordinator is None or processes is None or rank is None:
            raise ValueError(
                "`coordinator`, `processes` and `rank` must be given together, or none"
                f" of them; got {given}."
            )
        place: Place | None = Place("arguments", coordinator, processes, rank)
    else:
        place = detect(timeout)
    if place is None:
        _log.info("no launcher found: one process")
        return None
    _log.info("process %d of %d (%s)", place.rank, place.processes, place.launcher)
    if place.processes > 1:
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.rank,
            local_device_ids=devices or place.devices,
            cluster_detection_method="deactivate",
            initialization_timeout=int(timeout),
        )
    return place
