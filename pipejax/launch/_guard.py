"""Work done in a child process that outlives whatever ends its parent."""

import contextlib
import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

PERIOD = 0.1
"""Seconds between two looks at what has ended."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def guarded(work: Callable[[Sequence[int]], int]) -> int:
    """Runs `work` in a child process that cleans up whatever ends this process.

    Only a signal tells a process that its parent was killed, and `work` has to be there
    to receive it. What it starts is killed in turn if that is what is killed.

    Args:
      work: takes a list to which the signals to end are appended as they arrive, and
        returns an exit status.

    Returns:
      The exit status of the child; 128 and the signal's number where one ended it.
    """
    received: list[int] = []
    parent = os.getpid()
    # Where it was ignored on entry, the status of a child would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with _collected(received):  # in the child too, from its first instruction on
        child = os.fork()
        if child == 0:
            die_with_parent(parent, signal.SIGTERM)
            code = 1
            try:
                code = work(received)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        # Signals are passed on here and not in a handler: a handler may run after
        # `waitpid` has freed the child's number.
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            while received:
                os.kill(child, received.pop(0))
            time.sleep(PERIOD)
    code = os.waitstatus_to_exitcode(ended[1])
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _collected(received: list[int]) -> Iterator[None]:
    """Appends the number of each signal to end to `received`, inside of the block."""
    # With nohup, SIGHUP is ignored and stays so.
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
    """Has the kernel send this process a signal when its parent ends (Linux).

    Args:
      parent: its number. Of a parent that has ended before this, the kernel says
        nothing: this process then sends the signal to itself.
      number: of the signal.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
