"""The communication thread, which runs functions one at a time beside the compute.

Collectives must be launched in the same order in every process, so only this thread may
launch them. It cannot be stopped while it waits for other processes. A program that is
interrupted meanwhile exits without it.
"""

import atexit
import functools
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_log = logging.getLogger(__name__)

GRACE = 5.0  # seconds that a program waits at its exit for reductions under way


class CommunicationThread:
    """Runs functions on a thread, in the order in which they are submitted.

    The thread starts with the first function.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._leave: Callable[[], None] | None = None

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Runs a function after all functions that were submitted before.

        Args:
          function: The function to run on the thread.
          *args: Its arguments.

        Returns:
          A future of `function(*args)`. Its `result` raises what the function raised.

        Raises:
          RuntimeError: In a process that was forked from the one with the thread.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "a train step with executor='host' must run in the process that made"
                " it, and this one was forked from it: threads do not survive a fork."
                " Start processes with the method 'spawn', and make a train step there."
            )
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve,
                args=(self._work,),
                name="pipejax-communication",
                daemon=True,
            )
            self._thread.start()
            self._leave = functools.partial(_leave, self._thread, self._work)
            atexit.register(self._leave)
        future: Future[Any] = Future()
        self._work.put((future, function, args))
        return future

    def join(self) -> None:
        """Waits until every submitted function has returned."""
        if self._thread is not None:
            self.submit(lambda: None).result()

    def __deepcopy__(self, memo: Any) -> "CommunicationThread":
        """Returns another thread, which has not started."""
        del memo
        return CommunicationThread()

    def __del__(self) -> None:
        self._work.put(None)
        if self._leave is not None:
            atexit.unregister(self._leave)


def _serve(work: "queue.SimpleQueue[Any]") -> None:
    """Runs submitted functions until `None` is in the queue."""
    while (item := work.get()) is not None:
        future, function, args = item
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        # The thread keeps no reference to the work while it waits for the next.
        del item, future, function, args


def _leave(thread: threading.Thread, work: "queue.SimpleQueue[Any]") -> None:
    """Waits for the thread at the exit of the program, but no longer than `GRACE`.

    If the thread still waits for other processes then, the program exits without it.
    The exit status is 130 after a `KeyboardInterrupt`, or else 1. Without this
    function, JAX would wait for the other processes, for minutes, and then for the
    collective, for ever.
    """
    work.put(None)
    thread.join(GRACE)
    if thread.is_alive():
        _log.error(
            "a reduction still waits for other processes %s s after this one ended;"
            " leaving without it",
            GRACE,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
        os._exit(130 if interrupted else 1)
