"""When a program whose collectives may meet those of others is dispatched."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from pipejax._internal.communication_thread import beside, join, submit

from ._own_collectives import spans_cpu_processes

Results = TypeVar("Results")


def in_turn(
    mesh: Mesh,
    program: Callable[..., Results],
    *args: Any,
    ended: Callable[[Results], Any] = lambda results: results,
) -> Results:
    """Dispatches a program on a mesh in its turn, and does not wait for its results.

    On CPUs of several processes, its collectives come after those that were submitted
    to the communication thread before, and before those that are submitted later. If
    the mesh has several CPU devices in this process, a program comes after all others
    that were dispatched in this way.

    The program stays on the caller's thread, whose settings of JAX it is compiled with.
    `ended` chooses the results that later programs wait for, which are kept until then.
    """
    several = spans_cpu_processes(mesh)
    if not several and not _shares_threads(mesh):
        return program(*args)
    join()
    results = program(*args)
    if several:
        submit(jax.block_until_ready, ended(results))
    else:
        beside(ended(results))
    return results


def _shares_threads(mesh: Mesh) -> bool:
    """Returns whether the mesh has several CPU devices in this process.

    They share one pool of threads. An all-reduce holds one thread for each device until
    all devices have joined it. If two steps ran at once, each could hold threads that
    the other waits for, and neither would end.
    """
    devices = mesh.local_devices
    return len(devices) > 1 and devices[0].platform == "cpu"
