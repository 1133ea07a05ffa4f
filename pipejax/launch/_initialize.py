"""Joins this process to the other processes of its job."""

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from pipejax._internal import (
    compilation_cache,
    leaving,
    proofs,
    threads,
    timeline,
)

from . import _liveness, _record, _roll_call, _standby
from ._detect import detect
from ._place import Place, check_address
from ._proxy import check_proxy
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
    """Joins this process to all others of its job, after a roll call.

    Call it before anything else asks JAX for a device. Unlike
    `jax.distributed.initialize`, it raises an error on every process that names a
    process which is missing or different.

    1. Find the place of this process: from the arguments, or by `pj.launch.detect`.
    2. Hold a roll call. Each process must come exactly once. All must have the same
       versions of Python, pipejax, JAX, jaxlib, Flax, Optax, NumPy and Orbax, the same
       settings of JAX, flags of XLA and `config`, and the same source of every module
       imported so far that is not an installed package.
    3. Set the variable `NPROC`, if XLA would otherwise have too few threads for the CPU
       devices of this process.
    4. Call `jax.distributed.initialize`, and check that each process has as many
       devices as the others.
    5. On CPUs, let each process write its compiled programs to JAX's persistent cache,
       if there is one. JAX writes those of process 0 alone.

    Args:
      coordinator: The address `host:port` at which process 0 waits for the others,
        given together with `processes` and `rank`. `None` takes the place that
        `pj.launch.detect` finds.
      processes: The number of processes in the job.
      rank: The number of this process, from 0 to `processes - 1`.
      devices: The accelerators of this process, as numbers among those that it sees, in
        place of the ones that its launcher gives it.
      bind: The address `host:port` at which process 0 listens. The default is the
        variable `JAX_COORDINATOR_BIND_ADDRESS`, or else the coordinator's address.
      config: Further values that must be the same on all processes, by name. They are
        compared as text.
      timeout: Seconds to wait for the other processes, in `(0, 1e6]`.
      heartbeat: Seconds after which JAX's runtime aborts all processes if it has heard
        nothing of one of them, in `[30, 1e6]`. A `pj.launch.Watchdog` names the silent
        process before that.

    Returns:
      The place of this process. `None` if there is no launcher, and then nothing is
      done.

    Raises:
      ValueError: If an argument breaks its rule, if `pj.launch.detect` raises it, or if
        a variable such as `http_proxy` would lead JAX to look for the coordinator
        behind a proxy.
      RollCallError: If a process does not come, comes twice or differs from the others.
        Every process raises it, with a line for each reason.
    """
    # Before the wait: files may change meanwhile, and this process keeps what it has.
    modules = _record.own_modules()
    _standby.wait_if_standing_by()
    check_heartbeat(heartbeat)
    if not 0 < timeout <= 1e6:
        raise ValueError(
            f"`timeout` must lie in (0, 1e6] seconds, got {timeout!r}. Give the time"
            " that the slowest process needs to come."
        )
    until = time.monotonic() + timeout
    place = _given(coordinator, processes, rank) or detect(timeout)
    if place is None:
        _log.info("no launcher found: this process runs alone")
        return None
    check_proxy(place.coordinator, os.environ)
    leaving.hurry_after_interrupts()
    if place.processes > 1:
        leaving.hurry_after_errors()
    said = "this is process %d of %d, according to %s"
    _log.info(said, place.rank, place.processes, place.launcher)
    bind = bind or os.environ.get(_BIND) or place.coordinator
    check_address("bind", bind, f"the argument, or {_BIND}")
    mine = _record.of_this_process(place, config or {}, modules)
    secret = proofs.secret_of()
    meeting = _roll_call.call(place, mine, bind=bind, timeout=timeout, secret=secret)
    _liveness.keep(meeting.connections)
    threads.set_enough()
    # One process alone joins too: the runtime then notices a signal to end.
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
    check_devices(meeting.hosts)
    compilation_cache.write_in_every_process()
    timeline.note("joined")
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
    # Every process sees the devices of all others, so all come to the same conclusion.
    counts = Counter(device.process_index for device in jax.devices())
    if len({counts[rank] for rank in range(len(hosts))}) > 1:
        each = (
            f"{counts[rank]} in process {rank} on {host}"
            for rank, host in enumerate(hosts)
        )
        raise _roll_call.RollCallError(
            "each process must have as many devices as the others; got"
            f" {', '.join(each)}; look for a lost device where there are fewer"
        )
