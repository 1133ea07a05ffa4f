"""Joins a process to all others."""

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from . import _record, _roll_call
from ._detect import detect
from ._place import Place, check_address
from ._watchdog import HEARTBEAT, check_heartbeat

_log = logging.getLogger("pipejax")

_BIND = "JAX_COORDINATOR_BIND_ADDRESS"


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
    *,
    devices: tuple[int, ...] | None = None,
    bind: str | None = None,
    config: Mapping[str, Any] | None = None,
    timeout: float = 300.0,
    heartbeat: float = HEARTBEAT,
) -> Place | None:
    """Joins this process to the others of its job, as its launcher says.

    To be called before anything else asks JAX for a device. First all processes say
    what they are: each must come once, with the same versions of Python, JAX, Flax,
    Optax and NumPy, the same settings of JAX and flags of XLA, the same `config`, and
    the same source of every module imported so far that is not an installed package.
    Then `jax.distributed` joins them, and each must have as many devices as the others.

    Args:
      coordinator: `host:port` at which process 0 waits, by hand; then also
        `processes` and `rank`. Without, what `pj.launch.detect` finds.
      processes: how many.
      rank: which of them this is, from 0.
      devices: numbers of the accelerators that are this process's, in place of those
        that its launcher gives it.
      bind: `host:port` at which process 0 listens, where that is not the coordinator's
        address; by default the variable JAX_COORDINATOR_BIND_ADDRESS, or that address.
      config: by name, what else must be the same everywhere, compared as text.
      timeout: seconds to wait for the others, above 0.
      heartbeat: seconds without a sign of a process after which JAX's runtime aborts
        all; a `pj.launch.Watchdog` names who is silent before that.

    Returns:
      Where this process stands; `None` without a launcher, and nothing was done.

    Raises:
      ValueError: for some of the three arguments without the others, or variables that
        say nothing, or two things; for a coordinator or `bind` without a port; for a
        timeout that is none, or a heartbeat of less than 30.
      RollCallError: on every process, with what is wrong and where, if one does not
        come, or comes twice, or differs.
    """
    check_heartbeat(heartbeat)
    if not 0 < timeout <= 1e6:
        raise ValueError(
            f"`timeout` must lie in (0, 1e6] seconds, got {timeout!r}: what the slowest"
            " process needs to come."
        )
    until = time.monotonic() + timeout
    place = _given(coordinator, processes, rank) or detect(timeout)
    if place is None:
        _log.info("no launcher found: one process")
        return None
    _log.info("process %d of %d (%s)", place.rank, place.processes, place.launcher)
    bind = bind or os.environ.get(_BIND) or place.coordinator
    check_address("bind", bind, f"the argument, or {_BIND}")
    mine = _record.of_this_process(place, config or {})
    hosts = _roll_call.call(place, mine, bind=bind, timeout=timeout)
    # One process too: so it has the runtime's notice of a signal to end.
    jax.distributed.initialize(
        place.coordinator,
        place.processes,
        place.rank,
        local_device_ids=devices or place.devices,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=int(heartbeat),
        initialization_timeout=max(10, int(until - time.monotonic())),
        coordinator_bind_address=bind,
    )
    check_devices(hosts)
    return place


def _given(
    coordinator: str | None, processes: int | None, rank: int | None
) -> Place | None:
    given = (coordinator, processes, rank)
    if coordinator is not None and processes is not None and rank is not None:
        return Place("arguments", coordinator, processes, rank)
    if given != (None, None, None):
        raise ValueError(
            "`coordinator`, `processes` and `rank` must be given together, or none of"
            f" them; got {given}."
        )
    return None


def check_devices(hosts: list[str]) -> None:
    """All processes see all devices: each comes to the same conclusion."""
    counts = Counter(device.process_index for device in jax.devices())
    if len({counts[rank] for rank in range(len(hosts))}) > 1:
        each = (
            f"{counts[rank]} in {rank} on {host}" for rank, host in enumerate(hosts)
        )
        raise _roll_call.RollCallError(
            f"processes must have as many devices as one another: {', '.join(each)}"
        )
