"""Starts processes, shows what they print, and leaves none behind."""

import contextlib
import dataclasses
import math
import os
import pathlib
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ._guard import PERIOD
from ._start import Process, Start

_AGAIN = 1.0  # seconds after which a signal that a process has dropped is sent again
_STOPPED = 2.0  # seconds after which a process that stays stopped is killed
_TAIL = 20  # the number of last lines that are kept of each process, to be shown again


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of the processes that `supervise` has run."""

    first: int | None  # the index of the process that failed first, before any signal
    # The exit status of `first`, negative for a signal. Without `first`, the status of
    # the largest magnitude.
    code: int
    lines: Sequence[str]  # the last lines that `first` has printed
    told: int | None  # the signal that asked this process to end the others


def supervise(
    starts: Sequence[Start],
    processes: Iterable[Process],
    grace: float,
    received: Sequence[int],
    look: Callable[[], object],
) -> Ended:
    """Waits until all processes have ended or one has failed, and leaves none behind.

    Args:
      starts: How each process is started.
      processes: The processes, which may be started as they are asked for.
      grace: Seconds that they have to end after a signal or a failure.
      received: The list to which `guarded` appends signals.
      look: Called as long as all run, many times a second.
    """
    children: list[_Child] = []
    try:
        for each in zip(starts, processes, strict=True):
            children.append(_Child(*each))
        # No process is forked once there are threads, which may hold locks.
        for child in children:
            child.reader.start()
        first = _first_failure(children, received, look)
        # A signal is for all processes, so they get it at once. After a failure, the
        # others may still notice it by themselves and save, and so are asked only after
        # `grace`.
        if not _wait(children, grace, received) and not received:
            _send(children, signal.SIGTERM)
            _wait(children, grace, received)
        if received:
            _tell(children, received[0], grace)
    finally:
        # SIGKILL goes to the whole group of each process, including those that have
        # ended: what a process has started there may have outlived it.
        _send(children, signal.SIGKILL)
        codes = [child.process.wait() for child in children]
    for child in children:
        child.reader.join(timeout=2.0)  # another process may keep the pipe open
    told = received[0] if received else None
    if first is None:
        return Ended(None, max(codes, key=abs), (), told)
    return Ended(first, codes[first], tuple(children[first].lines), told)


class _Child:
    """A process whose lines are printed behind its name, and the last of them kept."""

    def __init__(self, start: Start, process: Process) -> None:
        self.name = start.name
        self.lines: deque[str] = deque(maxlen=_TAIL)
        self.process = process
        self.pid = self.process.pid
        self.reader = threading.Thread(target=self._read, daemon=True)

    def code(self) -> int | None:
        # `WNOWAIT` leaves the process a zombie, unlike `Popen.poll()`. Its process id
        # and its group id can then not be given to another process while signals are
        # sent to them.
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        ended = os.waitid(os.P_PID, self.pid, flags)
        if ended is None:
            return None
        exited = ended.si_code == os.CLD_EXITED
        return ended.si_status if exited else -ended.si_status

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line)
            # If nobody reads our output, read on: the process would block otherwise.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.write(f"[{self.name}] {line}")
                sys.stdout.flush()


def _first_failure(
    children: Sequence[_Child], received: Sequence[int], look: Callable[[], object]
) -> int | None:
    """Returns the index of the first process to fail; `None` after a signal."""
    running, looked = [0.0] * len(children), -math.inf
    while not received:
        look()
        # Restart the clocks if this process was stopped: the others may have been too.
        if time.monotonic() - looked > 10 * PERIOD:
            running = [time.monotonic()] * len(children)
        looked = time.monotonic()
        for place, child in enumerate(children):
            if not _is_stopped(child.pid):
                running[place] = time.monotonic()
            # A process that stays stopped, for example by SIGSTOP, would never fail by
            # itself, and the others do not wait for it.
            elif time.monotonic() - running[place] > _STOPPED:
                os.kill(child.pid, signal.SIGKILL)
        codes = [child.code() for child in children]
        if failed := [place for place, code in enumerate(codes) if code]:
            return failed[0]
        if None not in codes:
            break
        time.sleep(PERIOD)
    return None


def _is_stopped(pid: int) -> bool:
    """Returns whether a process waits for SIGCONT, and is not held by a debugger."""
    try:
        said = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # the process has ended
        return False
    return said.rpartition(")")[2].split()[0] == "T"


def _tell(children: Sequence[_Child], number: int, grace: float) -> None:
    """Sends a signal to all processes, and waits `grace` seconds for their end."""
    _send(children, number)
    until = time.monotonic() + grace
    while not _wait(children, min(_AGAIN, until - time.monotonic())):
        if time.monotonic() > until:
            return
        for child in children:
            # Python drops a KeyboardInterrupt that is raised in a callback, such as the
            # one that JAX has in every garbage collection, and prints so.
            text = "".join(list(child.lines))
            if "Exception ignored in" in text and "\nKeyboardInterrupt" in text:
                child.lines.clear()
                _send([child], number)


def _wait(
    children: Sequence[_Child], seconds: float, received: Sequence[int] = ()
) -> bool:
    """Returns whether all have ended in this time, and before any signal."""
    until = time.monotonic() + seconds
    while any(child.code() is None for child in children):
        if received or time.monotonic() > until:
            return False
        time.sleep(PERIOD)
    return True


def _send(children: Sequence[_Child], number: int) -> None:
    """Sends a signal to the group of each process, with all that it has started."""
    for child in children:
        os.killpg(child.pid, number)
