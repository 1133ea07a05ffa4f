"""The threads with which XLA:CPU runs the programs of a process.

XLA:CPU has one pool of threads for all devices of a process: as many as the variable
`NPROC` says when JAX first asks for a device, or else as the process has cores, but at
least one for each device. A program holds a thread on each of its devices while it
waits for other devices or processes. If all threads are held by programs that wait for
each other, no process goes on. With D devices, these may wait at once:

- a program on all D devices. XLA runs only one of them at a time.
- one sum of the communication thread, which is again such a program, or for a sharded
  model D programs on a single device each.
- the launch of the next program on all D devices. Each device waits with a thread of
  its own until it has fewer than 32 programs in flight.

That is 3 D. A single device launches its programs on the caller's thread. It waits for
nothing but the sum, which leaves one thread to compute.
"""

import logging
import os
import pathlib
import re

import jax
from jax.sharding import Mesh

_log = logging.getLogger("pipejax")

_POOL = "tf_XLAEigen"  # the name of the threads of XLA:CPU's pool
_MOST = 256  # the most threads of this name; XLA's other pool has no limit


def needed(devices: int) -> int:
    """Returns the number of threads for a process of a job with these CPU devices."""
    return 2 if devices == 1 else 3 * devices


def configured_devices() -> int:
    """Returns the number of CPU devices that JAX will have, before it has any."""
    count = int(jax.config.jax_num_cpu_devices)  # type: ignore[attr-defined]
    flags = os.environ.get("XLA_FLAGS", "")
    flag = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return count if count >= 0 else int(flag[-1]) if flag else 1


def set_enough() -> None:
    """Sets `NPROC` so that XLA:CPU starts enough threads, before JAX has a backend."""
    least, given = needed(configured_devices()), os.environ.get("NPROC", "")
    own = int(given) if given.isdecimal() else len(os.sched_getaffinity(0))
    if own < least:
        os.environ["NPROC"] = str(least)
        said = "NPROC is set to %d, because %d threads would not do for %d CPU devices"
        _log.info(said, least, own, configured_devices())


def check_threads(mesh: Mesh) -> None:
    if not mesh.is_multi_process or mesh.devices.flat[0].platform != "cpu":
        return
    devices, there = len(mesh.local_devices), running()
    least = min(needed(devices), _MOST)
    if devices > 1 and there is not None and there < least:
        raise ValueError(
            f"`mesh` must lie on processes with at least {least} threads of XLA where"
            f" {devices} CPU devices of each are used, or they may wait for each other"
            f" for ever; this process has {there}. Call pj.launch.initialize() in place"
            f" of jax.distributed.initialize(), or set NPROC={least} in the environment"
            " before JAX is asked for a device."
        )


def running() -> int | None:
    # The threads themselves are counted, because `NPROC` may have been set too late.
    tasks = pathlib.Path("/proc/self/task")
    if not tasks.is_dir():
        return None
    names = [_name(task) for task in tasks.iterdir()]
    return names.count(_POOL)


def _name(task: pathlib.Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:
        return ""
