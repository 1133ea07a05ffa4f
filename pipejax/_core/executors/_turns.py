"""When a program whose collectives may meet those of others is dispatched."""

from typing import Any

import jax
from jax.sharding import Mesh

from pipejax._internal.communication_thread import beside, join, submit

from ._own_collectives import spans_cpu_processes


def wait_turn(mesh: Mesh) -> None:
    """Waits until a program on the mesh may be dispatched.

    On CPUs of several processes, its collectives come after those that were submitted
    to the communication thread before. If the mesh has several CPU devices in this
    process, the program comes after all that were handed on before.
    """
    if _shares_threads(mesh) or spans_cpu_processes(mesh):
        join()


def hand_on(mesh: Mesh, results: Any) -> None:
    """Keeps collectives that are submitted later behind the program of these results.

    The program stays on the caller's thread, whose settings of JAX it is compiled with.
    """
    if spans_cpu_processes(mesh):
        submit(jax.block_until_ready, results)
    elif _shares_threads(mesh):
        beside(results)


def _shares_threads(mesh: Mesh) -> bool:
    """Returns whether the mesh has several CPU devices in this process.

    They share one pool of threads. An all-reduce holds one thread for each device until
    all devices have joined it. If two steps ran at once, each could hold threads that
    the other waits for, and neither would end.
    """
    devices = mesh.local_devices
    return len(devices) > 1 and devices[0].platform == "cpu"
