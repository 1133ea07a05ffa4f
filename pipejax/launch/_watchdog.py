"""A watchdog that ends a job which stands still, and names the process at fault."""

import contextlib
import math
import operator
import threading
import time
import traceback
from collections.abc import Iterator
from types import TracebackType

import jax

from pipejax._internal import timeline
from pipejax._internal.key_value_client import key_value_client

from ._kv_store import KeyValueStore
from ._monitor import PERIOD, Monitor, Progress, described, end

# The default heartbeat timeout of JAX's runtime, in seconds. The runtime aborts all
# processes once it has heard nothing of one of them for this long.
HEARTBEAT = 100.0
# Seconds by which the longest limit stays below the heartbeat timeout. In this time,
# all processes can name a silent one, before the runtime aborts them.
_SOONER = 20.0
_NOTED = 0.2  # seconds between two notes in the timeline
_MOST = 5000  # notes in a timeline, after which they become rarer
_LEAST = 10.0  # the shortest limit, in seconds


def check_heartbeat(seconds: float) -> float:
    # There has to be a valid limit, from _LEAST to `seconds - _SOONER`.
    if not _LEAST + _SOONER <= seconds <= 1e6:
        raise ValueError(
            f"`heartbeat` must lie in [{_LEAST + _SOONER:g}, 1e6] seconds, got"
            f" {seconds!r}. JAX's own default is {HEARTBEAT:g}."
        )
    return seconds


class Watchdog:
    """Ends all processes of a job soon after one of them dies or stands still.

    Without a watchdog, the other processes wait inside of a collective until a timeout
    of NCCL or of JAX's runtime, which names no process. Enter a watchdog around the
    training loop on every process, and call `step` at the beginning of each step.

    1. Twice a second, every process reports through the key-value store of JAX's
       runtime that it is alive, at which step it is, and since when.
    2. Process 0 diagnoses the reports of all processes. It also sees the kernel close
       the connection of a process that ends, if `initialize` has joined the processes.
       The other processes check that process 0 still reports. A process is silent after
       `limit` seconds without a report. If it takes steps, it is silent after 20 times
       the longest of the last 20, or five times the longest delay of its last 40
       reports, if the longer of the two is less than `limit`, but not before 2 seconds.
    3. When a process is at fault, every process prints the rank, host and step of that
       process, and the stack of the thread that calls `step` if it stands still. Every
       process exits with status 75, `pj.launch.FAULT`, soon after the limit, or about a
       second after a process has died.

    A process in which a thread holds Python's interpreter and never releases it prints
    the stacks of its threads instead, and exits with status 1.

    Compiling, and writing or reading a checkpoint, may take any time: a process that
    does so is not at fault, nor is one that waits for it inside of JAX. The same holds
    for all processes while one of them is inside of `pause`.

    An exception that leaves the `with` block is a fault. All processes print it, about
    two seconds later. Leaving the block in good order, or by `sys.exit()` without an
    error, waits until all processes have left theirs. In a job of one process the
    watchdog does nothing.

    A watchdog cannot

    - say where in its program a process was that has died or is stopped,
    - end a process that is stopped,
    - report that process 0 has died, because JAX then aborts all others at once.

    `pipejax launch` does the last two.

    Args:
      limit: Seconds without a step, or without a report, after which a process is at
        fault.
      heartbeat: The `heartbeat` that `initialize` was given, in seconds. A limit above
        80 seconds needs a longer one than the default.

    Raises:
      ValueError: If `limit` is not in `[10, heartbeat - 20]`, or if `heartbeat` is not
        in `[30, 1e6]`.

    Examples:
      >>> import pipejax as pj
      >>> with pj.launch.Watchdog(limit=60.0) as watchdog:
      ...     for number in range(3):
      ...         watchdog.step(number)
      ...     with watchdog.pause("evaluation"):
      ...         print(f"{number + 1} steps")
      3 steps
    """

    def __init__(self, limit: float = 60.0, *, heartbeat: float = HEARTBEAT) -> None:
        most = check_heartbeat(heartbeat) - _SOONER
        if not _LEAST <= limit <= most:
            raise ValueError(
                f"`limit` must lie in [{_LEAST:g}, {most:g}] seconds, since processes"
                f" report every {PERIOD:g} s, and JAX's runtime aborts all of them"
                f" {heartbeat:g} s after the last sign of one; got {limit!r}. Put work"
                " that takes longer inside of `pause`, or give a longer `heartbeat` to"
                " both `initialize` and `Watchdog`."
            )
        self._limit = limit
        self._progress = Progress()
        self._monitor: Monitor | None = None
        self._began = time.monotonic()
        self._noted = -math.inf  # when a step was last noted in the timeline

    def step(self, number: int) -> None:
        """Reports that this process begins a step.

        Args:
          number: The number of the step, an integer of any type. It must grow over the
            whole run for `pipejax launch` to tell how much of the time was useful.

        Raises:
          TypeError: If `number` is not an integer.
        """
        progress, now = self._progress, time.monotonic()
        progress.thread = threading.get_ident()
        progress.step = operator.index(number)
        if progress.stepped:
            progress.paces.append(now - progress.since)
        progress.since, progress.stepped = now, True
        # The longer a run, the fewer notes it needs.
        if now - self._noted > max(_NOTED, (now - self._began) / _MOST):
            self._noted = now
            timeline.note("step", step=progress.step)

    @contextlib.contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Keeps all processes from being at fault while this one does other work.

        Use the context manager around work that may take longer than the limit, such as
        an evaluation. A process that dies or raises an exception is still at fault.

        Args:
          what: The name of the work, which other processes print.

        Raises:
          ValueError: If `what` is empty.
        """
        if not what:
            raise ValueError(
                f"`what` must name the work, such as 'evaluation'; got {what!r}."
            )
        before, self._progress.busy = self._progress.busy, what
        try:
            yield
        finally:
            self._progress.busy = before
            self._progress.since, self._progress.stepped = time.monotonic(), False

    def __enter__(self) -> "Watchdog":
        self._progress.since = time.monotonic()
        self._progress.thread = threading.get_ident()
        client = key_value_client()
        if client is not None and jax.process_count() > 1:
            rank, processes = jax.process_index(), jax.process_count()
            self._monitor = Monitor(
                # Watchdogs that a program opens in turn have stores of their own, so
                # that one never reads the last reports of the one before.
                KeyValueStore.opened(client, rank),
                rank,
                processes,
                self._limit,
                self._progress,
                end,
            )
            self._monitor.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self._noted > 0:
            timeline.note("step", step=self._progress.step + 1)  # it has ended
        if self._monitor is None:
            return
        # `sys.exit()` is the usual end of a program, and its code is `None` or 0.
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._progress.finished = True
        else:
            # An exception may also be a consequence of the monitor ending the process.
            if not self._monitor.ending:
                traceback.print_exception(kind, error, trace)
            self._progress.since = time.monotonic()
            self._progress.failed = described(error)
        # After a failure this call never returns, because the monitor ends the process.
        self._monitor.over.wait()
