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

_TAIL = 20
"""Lines of the first that failed, kept to be shown again."""


@dataclasses.dataclass(frozen=True)
class Start:
    """A process to be started.

    Attributes:
      name: what stands before each line that it prints.
      command: what it runs.
      environment: its variables, all of them.
      cores: those that it may use; `None` is all.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    cores: set[int] | None = None


@dataclasses.dataclass(frozen=True)
class Ended:
    """How processes ended.

    Attributes:
      first: which of them failed first; `None` if none did.
      code: its exit status, negative for a signal that ended it; 0 without one.
      lines: the last that it printed.
      told: the signal by which this process was told to end them, or `None`.
    """

    first: int | None
    code: int
    lines: Sequence[str]
    told: int | None


def supervise(starts: Sequence[Start], grace: float, received: Sequence[int]) -> Ended:
    """Runs all until they have ended, or one has failed.

    Then the others have `grace` seconds to end by themselves, are sent SIGTERM, and are
    killed after `grace` seconds more, with all that they have started. A signal
    to end is passed on at once; then all have `grace` seconds, and are killed. One that
    is stopped, as by SIGSTOP, for `grace` seconds is killed: it would never fail.

    Args:
      starts: what to run.
      grace: seconds.
      received: the signals to end that have arrived, as `guarded` passes them.
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
        for number in received[:1] or (None, signal.SIGTERM):
            if number is not None:
                _send(children, number)
            if _wait(children, grace):
                break
    finally:
        _send(children, signal.SIGKILL)
        codes = [child.wait() for child in children]
    for reader, _ in shown:
        reader.join(timeout=2.0)  # whoever else has the pipe may keep it open
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
        start_new_session=True,  # a group, to which whatever it starts belongs
        preexec_fn=prepare,
    )


def _show(
    name: str, child: "subprocess.Popen[str]"
) -> tuple[threading.Thread, deque[str]]:
    """Prints what it prints, each line behind its name, and keeps the last."""
    lines: deque[str] = deque(maxlen=_TAIL)

    def read() -> None:
        for line in child.stdout or ():
            lines.append(line)
            # Read on where nobody takes it: the process would wait for that.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.write(f"[{name}] {line}")
                sys.stdout.flush()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return reader, lines


def _first_failure(
    children: Sequence["subprocess.Popen[str]"], received: Sequence[int], grace: float
) -> int | None:
    """Which failed first; `None` once all have ended well, or a signal has come."""
    running, looked = [0.0] * len(children), -math.inf
    while not received:
        # At first, and where it was this process that was stopped, perhaps with all.
        if time.monotonic() - looked > 10 * PERIOD:
            running = [time.monotonic()] * len(children)
        looked = time.monotonic()
        for place, child in enumerate(children):
            if not _is_stopped(child.pid):
                running[place] = time.monotonic()
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
    """Exit status of a process that has ended, negative for a signal that ended it.

    Unlike `child.poll()` this leaves the process a zombie, so that no other process is
    given its number, or its group's, while they are still sent signals.
    """
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    ended = os.waitid(os.P_PID, child.pid, flags)
    if ended is None:
        return None
    exited = ended.si_code == os.CLD_EXITED
    return ended.si_status if exited else -ended.si_status


def _is_stopped(pid: int) -> bool:
    """Whether it waits for SIGCONT; one that a debugger holds does not."""
    try:
        said = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended
        return False
    return said.rpartition(")")[2].split()[0] == "T"


def _wait(children: Sequence["subprocess.Popen[str]"], seconds: float) -> bool:
    """Whether all have ended within this time."""
    until = time.monotonic() + seconds
    while any(_code(child) is None for child in children):
        if time.monotonic() > until:
            return False
        time.sleep(PERIOD)
    return True


def _send(children: Sequence["subprocess.Popen[str]"], number: int) -> None:
    """To each and all that it has started."""
    for child in children:
        os.killpg(child.pid, number)
