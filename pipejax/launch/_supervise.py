"""Starts processes, shows what they print, and leaves none behind."""

import contextlib
import dataclasses
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from ._guard import PERIOD, die_with_parent

_AGAIN = 1.0
"""Seconds after which a signal that a process has dropped is sent again."""
_TAIL = 20
"""The number of last lines that are kept of each process, to be shown again."""


@dataclasses.dataclass(frozen=True)
class Start:
    """A process to be started.

    Attributes:
      name: The name that stands before each line that the process prints.
      cores: The CPU cores that the process may use. `None` means all.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    cores: set[int] | None = None


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of the processes that `supervise` has run.

    Attributes:
      first: The index of the process that failed first, before any signal, or `None`.
      code: Its exit status, negative for a signal; without `first`, the one of largest
        magnitude.
      lines: The last lines that the process that failed first has printed.
      told: The signal that asked this process to end the others, or `None`.
    """

    first: int | None
    code: int
    lines: Sequence[str]
    told: int | None


def supervise(starts: Sequence[Start], grace: float, received: Sequence[int]) -> Ended:
    """Runs processes until all have ended or one has failed, and leaves none behind.

    They have `grace` seconds to end. `guarded` passes the signals `received`.
    """
    children: list[subprocess.Popen[str]] = []
    try:
        for start in starts:
            children.append(_started(start))
        shown = [
            _show(start.name, child)
            for start, child in zip(starts, children, strict=True)
        ]
        first = _first_failure(children, received, grace)
        # A signal is for all processes, so they get it at once. After a failure, the
        # others may still notice it by themselves and save, and so are asked only after
        # `grace`.
        if received:
            _tell(children, [lines for _, lines in shown], received[0], grace)
        elif not _wait(children, grace):
            _send(children, signal.SIGTERM)
            _wait(children, grace)
    finally:
        # SIGKILL goes to the whole group of each process, including those that have
        # ended: what a process has started there may have outlived it.
        _send(children, signal.SIGKILL)
        codes = [child.wait() for child in children]
    for reader, _ in shown:
        reader.join(timeout=2.0)  # another process may keep the pipe open
    told = received[0] if received else None
    if first is None:
        return Ended(None, max(codes, key=abs), (), told)
    return Ended(first, codes[first], tuple(shown[first][1]), told)


def _started(start: Start) -> "subprocess.Popen[str]":
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(parent, signal.SIGKILL)
        if start.cores is not None:
            os.sched_setaffinity(0, start.cores)

    return subprocess.Popen(
        start.command,
        env=dict(start.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a group that includes what the process starts
        preexec_fn=prepare,
    )


def _show(
    name: str, child: "subprocess.Popen[str]"
) -> tuple[threading.Thread, deque[str]]:
    """Prints the lines of a process behind its name, and keeps the last ones."""
    lines: deque[str] = deque(maxlen=_TAIL)

    def read() -> None:
        for line in child.stdout or ():
            lines.append(line)
            # If nobody reads our output, read on: the process would block otherwise.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.write(f"[{name}] {line}")
                sys.stdout.flush()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return reader, lines


def _first_failure(
    children: Sequence["subprocess.Popen[str]"], received: Sequence[int], grace: float
) -> int | None:
    """Returns the index of the first process to fail; `None` after a signal."""
    running, looked = [0.0] * len(children), -math.inf
    while not received:
        # Restart the clocks if this process was stopped: the others may have been too.
        if time.monotonic() - looked > 10 * PERIOD:
            running = [time.monotonic()] * len(children)
        looked = time.monotonic()
        for place, child in enumerate(children):
            if not _is_stopped(child.pid):
                running[place] = time.monotonic()
            # A process that stays stopped, for example by SIGSTOP, would never fail by
            # itself.
            elif time.monotonic() - running[place] > grace:
                os.kill(child.pid, signal.SIGKILL)
        codes = [_code(child) for child in children]
        if failed := [place for place, code in enumerate(codes) if code]:
            return failed[0]
        if None not in codes:
            break
        time.sleep(PERIOD)
    return None


def _code(child: "subprocess.Popen[str]") -> int | None:
    # `WNOWAIT` leaves the process a zombie, unlike `child.poll()`. Its process id and
    # its group id can then not be given to another process while signals are sent to
    # them.
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    ended = os.waitid(os.P_PID, child.pid, flags)
    if ended is None:
        return None
    exited = ended.si_code == os.CLD_EXITED
    return ended.si_status if exited else -ended.si_status


def _is_stopped(pid: int) -> bool:
    """Returns whether a process waits for SIGCONT, and is not held by a debugger."""
    try:
        said = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # the process has ended
        return False
    return said.rpartition(")")[2].split()[0] == "T"


def _tell(
    children: Sequence["subprocess.Popen[str]"],
    said: Sequence[deque[str]],
    number: int,
    grace: float,
) -> None:
    """Sends a signal to all processes, and waits `grace` seconds for their end."""
    _send(children, number)
    until = time.monotonic() + grace
    while not _wait(children, min(_AGAIN, until - time.monotonic())):
        if time.monotonic() > until:
            return
        for child, lines in zip(children, said, strict=True):
            # Python drops a KeyboardInterrupt that is raised in a callback, such as the
            # one that JAX has in every garbage collection, and prints so.
            text = "".join(list(lines))
            if "Exception ignored in" in text and "\nKeyboardInterrupt" in text:
                lines.clear()
                _send([child], number)


def _wait(children: Sequence["subprocess.Popen[str]"], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while any(_code(child) is None for child in children):
        if time.monotonic() > until:
            return False
        time.sleep(PERIOD)
    return True


def _send(children: Sequence["subprocess.Popen[str]"], number: int) -> None:
    """Sends a signal to the group of each process, with all that it has started."""
    for child in children:
        os.killpg(child.pid, number)
