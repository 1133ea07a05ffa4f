"""The communication thread of this process, which runs functions one at a time.

All processes must launch their collectives in the same order. A process has a single
channel to the others, however many train steps it runs, and so it has a single
communication thread. Work of all train steps runs in the order in which it was
submitted, beside the compute. Nothing else changes this order: a train step that is
dropped leaves its work in the queue.

The thread cannot be stopped while it waits for other processes. A program that is
interrupted meanwhile exits without it.
"""

import atexit
import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import jax

from pipejax._internal import leaving

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

GRACE = 5.0  # seconds that a program waits at its exit for reductions under way


class CommunicationThread:
    """Runs functions on a thread, in the order in which they are submitted.

    The thread starts with the first function, and ends with the program.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = 0  # the one in which the thread was started
        self._starting = threading.Lock()
        self._beside: jax.Array | None = None  # of the newest program of the caller

    def beside(self, results: Any) -> None:
        """Notes a program that the caller's thread runs, by its results."""
        leaves = [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]
        # One result tells, and a small one keeps no memory.
        self._beside = min(leaves, key=lambda x: x.size, default=None)

    def submit(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Runs a function after all functions that were submitted before.

        JAX has the same precision there as where the function is submitted.
        """
        with self._starting:
            if self._thread is None:
                self._start()
        if os.getpid() != self._process:
            raise RuntimeError(
                "a train step with executor='host' must run in the process that made"
                " it, and this one was forked from it: threads do not survive a fork."
                " Start processes with the method 'spawn', and make a train step there."
            )
        future: Future[Result] = Future()
        # `with jax.enable_x64()` acts on the caller's thread alone. If the setting were
        # not passed on, this thread would sum float64 in float32.
        x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        self._work.put((future, x64, function, args))
        return future

    def join(self) -> None:
        """Waits for every submitted function and for the program beside them."""
        if self._thread is not None:
            self.submit(lambda: None).result()
        last, self._beside = self._beside, None
        if last is not None and not last.is_deleted():
            last.block_until_ready()

    def _start(self) -> None:
        self._process = os.getpid()
        thread = threading.Thread(
            target=_serve, args=(self._work,), name="pipejax-communication", daemon=True
        )
        thread.start()
        self._thread = thread
        atexit.register(_leave, thread, self._work, leaving.prepared())


def _serve(work: "queue.SimpleQueue[Any]") -> None:
    while (item := work.get()) is not None:
        future, x64, function, args = item
        try:
            with jax.enable_x64(x64):
                future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        # The thread keeps no reference to the work while it waits for the next.
        del item, future, function, args


def _leave(
    thread: threading.Thread,
    work: "queue.SimpleQueue[Any]",
    leave: Callable[[], None],
) -> None:
    """Waits for the thread at the exit of the program, but no longer than `GRACE`.

    If the thread still waits for other processes then, the program leaves the job and
    exits without it. Without this function, JAX would wait for the other processes, for
    minutes, and then for the collective, for ever.
    """
    work.put(None)
    seconds = leaving.HURRY if leaving.interrupted() else GRACE
    thread.join(seconds)
    if thread.is_alive():
        _log.error(
            "a reduction still waits for other processes %s s after this one ended;"
            " leaving without it",
            seconds,
        )
        leave()


_THREAD = CommunicationThread()
"""The thread of this process: the one thing that all train steps share."""

beside, submit, join = _THREAD.beside, _THREAD.submit, _THREAD.join
