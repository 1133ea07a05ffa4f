"""A process that stands by: it has imported its program, and has not joined the job.

`pipejax launch --standby` starts one beside each process of a running job. It runs the
same program, and waits inside of `pipejax.launch.initialize`. When the job is started
again after a fault, it is woken and told its place, and need not import anything.
"""

import contextlib
import dataclasses
import json
import logging
import os
import signal
from collections.abc import Iterable, MutableMapping, Sequence

from ._guard import die_with_parent
from ._start import Process, Start, opened, started

_log = logging.getLogger(__name__)

VARIABLE = "PIPEJAX_STANDBY"
"""The variable that holds the file descriptor from which a process is woken."""

# Without them, a program that does not wait in `initialize` cannot disturb the job.
_PLACE = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def wait_if_standing_by(environ: MutableMapping[str, str] = os.environ) -> None:
    """Waits until this process is woken, if it stands by, and takes its variables.

    If its launcher ends before, so does this process.
    """
    if (number := environ.pop(VARIABLE, None)) is None:
        return
    parent = os.getppid()  # the launcher, or a program that it has started
    with open(int(number)) as woken:
        line = woken.readline()
    if not line.endswith("\n"):
        os._exit(0)
    environ.update(json.loads(line))
    die_with_parent(parent, signal.SIGKILL)


class Reserve:
    """The processes that stand by for the next attempt of a job.

    Attributes:
      wanted: Whether there are to be any.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self._standing: list[tuple[Process, int]] = []

    def fill(self, starts: Sequence[Start]) -> None:
        """Starts a process for each place, unless they are there or not wanted.

        If one cannot be started, a log record says so, and there are none any more.
        """
        if not self.wanted or self._standing:
            return
        try:
            for start in starts:
                self._standing.append(_stands_by(start))
        except OSError as error:
            self.end()
            self.wanted = False
            _log.warning("no process stands by: %s", error)

    def take(self, starts: Sequence[Start]) -> Iterable[Process]:
        """Returns a process for each place: those that stand by, or else new ones."""
        standing, self._standing = self._standing, []
        if not standing or any(each.poll() is not None for each, _ in standing):
            _end(standing)
            return map(started, starts)  # one by one, as they are asked for
        for (_, wakes), start in zip(standing, starts, strict=True):
            # One that has ended meanwhile is noticed as a process that has failed.
            with contextlib.suppress(BrokenPipeError), open(wakes, "w") as end:
                end.write(json.dumps(dict(start.environment)) + "\n")
        return [process for process, _ in standing]

    def end(self) -> None:
        """Ends those that are not needed any more."""
        _end(self._standing)
        self._standing = []


def _stands_by(start: Start) -> tuple[Process, int]:
    """Starts a process that stands by; returns also what wakes it."""
    end, wakes = os.pipe()
    kept = {k: v for k, v in start.environment.items() if k not in _PLACE}
    # Nothing runs between fork and exec: the launcher has threads by now.
    told = dataclasses.replace(start, environment={**kept, VARIABLE: str(end)})
    process = opened(told, pass_fds=[end])
    os.close(end)
    if start.cores is not None:
        os.sched_setaffinity(process.pid, start.cores)
    return process, wakes


def _end(standing: Sequence[tuple[Process, int]]) -> None:
    for process, wakes in standing:
        os.close(wakes)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
