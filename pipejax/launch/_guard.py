"""Runs work in a child process, which can clean up after its parent has ended."""

import contextlib
import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

PERIOD = 0.05  # seconds between two checks whether a process has ended
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
SHOW = signal.SIGUSR1
"""The signal that asks for what there is to show."""
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def guarded(work: Callable[[Sequence[int]], int]) -> int:
    """Runs `work` in a child process, which can clean up after this process has ended.

    `work` is given a list. Each signal of `_ENDS` that this process or the child
    receives is appended to it. Each `SHOW` is passed on to the child too. Returns the
    exit status of the child, or 128 plus the number of the signal that has ended it.
    """
    received: list[int] = []
    shows: list[int] = []
    signal.signal(SHOW, lambda number, _: shows.append(number))
    parent = os.getpid()
    # If SIGCHLD were still ignored, the exit status of the child would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with _collected(received):  # also in the child, from its first instruction on
        child = os.fork()
        if child == 0:
            # A process that is killed cannot clean up after itself, so the kernel tells
            # the child. If the child is killed instead, the kernel kills what `work`
            # has started with `die_with_parent`.
            die_with_parent(parent, signal.SIGTERM)
            code = 1
            try:
                code = work(received)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        # Signals are passed on here and not in a handler. A handler may run after
        # `waitpid` has freed the process id of the child.
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            for numbers in (received, shows):
                while numbers:
                    os.kill(child, numbers.pop(0))
            time.sleep(PERIOD)
    code = os.waitstatus_to_exitcode(ended[1])
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _collected(received: list[int]) -> Iterator[None]:
    # Under nohup, SIGHUP is ignored, and must stay so.
    numbers = [each for each in _ENDS if signal.getsignal(each) != signal.SIG_IGN]
    before = [
        signal.signal(number, lambda number, _: received.append(number))
        for number in numbers
    ]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def die_with_parent(parent: int, number: int) -> None:
    """Asks the kernel to signal this process when its parent ends (Linux only)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    # The parent has ended before the call: the kernel will send nothing.
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
