"""Leaves a job of several processes in bounded time.

At its exit, JAX waits until all processes of the job have come to theirs, for minutes.
After Ctrl-C, a process may wait there for another one that waits for it, in a
collective or a checkpoint that only one of them has begun. Therefore:

- A `KeyboardInterrupt` that Python drops is raised again. Python drops exceptions of
  callbacks, such as the one that JAX has in every garbage collection.
- A program that a `KeyboardInterrupt` ends exits within `LIMIT` seconds, and one that
  another exception ends within `ERROR_LIMIT`.
- Python raises a `KeyboardInterrupt` only when its main thread returns from a call into
  C++, which may wait for another process. After `STUCK` seconds, the process exits.

Before it exits, a process says so to JAX's runtime. JAX would otherwise abort the
others: at once if process 0 has gone, or else when its heartbeats fail to come.
"""

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import jax

_log = logging.getLogger("pipejax")

# Seconds after which a program that was interrupted has exited. Another process may
# notice the interrupt only when this one has gone. Then it takes as long, and the two
# together stay below ten seconds.
LIMIT = 4.0
# Seconds after which a program that another exception ended has exited. Its own work
# at the end, such as that of a logger, may take some of them.
ERROR_LIMIT = 10.0
# Seconds after Ctrl-C that a process may be inside of a call into C++. The call fails
# sooner if it waits for a process that leaves within `LIMIT`.
STUCK = 8.0
# Seconds that an interrupted program waits for work that needs other processes. These
# wait for this process until `LIMIT`, so that there is time for `_say_goodbye` even if
# they were interrupted two seconds earlier.
HURRY = 1.0
_AGAIN = 0.05  # seconds until a `KeyboardInterrupt` that was dropped is raised again
_GOODBYE = 2.0  # seconds to wait for the others to say that they leave, too


def interrupted() -> bool:
    return isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)


def prepared() -> Callable[[], None]:
    """Returns a function that ends the process with status 130 or 1."""
    leaving = threading.Event()

    def end() -> None:
        _exit(130 if interrupted() else 1)

    def bound() -> None:
        leaving.wait()
        time.sleep(_GOODBYE)
        end()

    def leave() -> None:
        leaving.set()
        _say_goodbye()
        end()

    # This thread starts now: Python starts no threads at the end of a program.
    threading.Thread(target=bound, name="pipejax-leaving", daemon=True).start()
    return leave


def within(seconds: float, work: Callable[[], Any]) -> bool:
    """Runs `work` on another thread, and returns whether it has ended in time."""

    def run() -> None:
        try:
            work()
        except Exception as error:
            _log.warning("an error while this process was leaving: %s", error)

    thread = threading.Thread(target=run, name="pipejax-leaving", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def hurry_after_interrupts() -> None:
    _raise_again()
    _hurry_at_the_end(KeyboardInterrupt, LIMIT, 130)
    main = threading.current_thread() is threading.main_thread()
    # A program with a handler of its own decides for itself what Ctrl-C does.
    if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _hurry_in_calls()


def hurry_after_errors() -> None:
    """Has this program exit within `ERROR_LIMIT` after an exception that ends it."""
    _hurry_at_the_end(Exception, ERROR_LIMIT, 1)


def _raise_again() -> None:
    """Has Python raise a `KeyboardInterrupt` again that it would otherwise drop."""
    before, main = sys.unraisablehook, threading.main_thread().ident or 0

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # At once, it would be raised in this hook, and dropped again.
            _later(_AGAIN, signal.pthread_kill, main, signal.SIGINT)
        else:
            before(unraisable)

    sys.unraisablehook = hook


def _hurry_at_the_end(wanted: type[BaseException], limit: float, status: int) -> None:
    """Has this program exit within `limit` seconds after such an exception ends it."""
    # Python calls this hook before it waits for threads and for JAX.
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        goes_on = sys.flags.interactive or hasattr(sys, "ps1")
        if issubclass(kind, wanted) and not goes_on:
            _later(limit, _exit, status)
        before(kind, error, trace)

    sys.excepthook = hook


def _later(seconds: float, function: Callable[..., None], *args: int) -> None:
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.start()


def _hurry_in_calls() -> None:
    """Has this program exit if its main thread does not notice Ctrl-C for `STUCK`."""
    # The system's handler writes the numbers of signals to a socket, even while the
    # main thread is in C++.
    heard, told = socket.socketpair()
    told.setblocking(False)
    if (other := signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)) != -1:
        signal.set_wakeup_fd(other)  # an event loop of the program has it
        return
    # The processes that this one forks share the socket, and have signals of their own.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    noticed = [-math.inf]  # when the main thread has last noticed Ctrl-C

    def handler(number: int, frame: FrameType | None) -> None:
        noticed[0] = time.monotonic()
        signal.default_int_handler(number, frame)

    def watch(heard: socket.socket, _: socket.socket) -> None:
        while numbers := heard.recv(1):
            if numbers[0] == signal.SIGINT:
                # The main thread may have been faster than this one.
                since, end = time.monotonic() - 1.0, time.monotonic() + STUCK
                while noticed[0] < since and time.monotonic() < end:
                    time.sleep(0.1)
                ours = signal.getsignal(signal.SIGINT) is handler
                if noticed[0] < since and ours:
                    _log.error("still in the same call %s s after Ctrl-C", STUCK)
                    _exit(130)

    signal.signal(signal.SIGINT, handler)
    threading.Thread(target=watch, args=(heard, told), daemon=True).start()


def _say_goodbye() -> None:
    try:
        jax.distributed.shutdown()
    except Exception as error:
        _log.warning("an error while this process was leaving: %s", error)


def flush() -> None:
    """Writes out what this process has printed, if anybody still reads it."""
    for stream in (sys.stdout, sys.stderr):
        # A pipe whose reader has gone must not keep the process from ending.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _exit(status: int) -> None:
    flush()
    os._exit(status)
