"""Keeps a loop from running far ahead of its device.

JAX dispatches up to 32 programs before a GPU has run the first. A loop that reads
nothing for 50 steps then waits for 32 of them at once. If steps are slow, a watchdog
takes that for a hang, and a job that is told to end has no time left to save.

When a step has run, it is known whether all devices were alike.
"""

import collections
import time
from typing import Any

import jax

from pipejax._core.message import check_alike

_SECONDS = 1.0  # of work that may be dispatched ahead
_LEAST, _MOST = 2, 32


class Lead:
    """The steps that were dispatched last, of which the device may not have run all.

    A call waits for the step that was dispatched n calls before, where n steps take
    about a second. Once calls wait, the time between two of them is that of a step.
    """

    def __init__(self) -> None:
        self._results: collections.deque[tuple[jax.Array, Any]] = collections.deque()
        self._steps, self._waited = _LEAST, False
        self._last = time.monotonic()

    def wait(self) -> None:
        """Waits until another step may be dispatched.

        Raises:
          ValueError: If devices were not alike in a step that has run.
        """
        now = time.monotonic()
        fit = int(_SECONDS / max(now - self._last, _SECONDS / _MOST))
        # Calls that wait for nothing are quick, however long a step is.
        self._steps = min(self._steps + self._waited, max(_LEAST, fit))
        self._last, self._waited = now, len(self._results) >= self._steps
        while len(self._results) >= self._steps:
            result, alike = self._results.popleft()
            if not result.is_deleted():
                result.block_until_ready()
            for flag in jax.tree.leaves(alike):
                check_alike(flag)

    def add(self, result: Any, alike: Any = None) -> None:
        """Notes a result of the step that was dispatched, unless it is traced.

        `alike` says whether all devices were alike, or is `None`.
        """
        if not isinstance(result, jax.core.Tracer):
            self._results.append((result, alike))

    def check_all(self, alike: Any = None) -> None:
        """Waits for all steps if devices compare what they call, and for a drain.

        Raises:
          ValueError: If devices were not alike in any of them.
        """
        flags = jax.tree.leaves(([flag for _, flag in self._results], alike))
        flags = [flag for flag in flags if not isinstance(flag, jax.core.Tracer)]
        if flags:
            self._results.clear()
        for flag in flags:
            check_alike(flag)
