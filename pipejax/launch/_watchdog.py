"""Ends a job that stands still, and says whose fault it is."""

import contextlib
import operator
import time
import traceback
from collections.abc import Iterator
from types import TracebackType

import jax

# JAX has no public way to its key-value store.
from jax._src import distributed

from ._board import Board
from ._patrol import PERIOD, Patrol, Progress, described, end

HEARTBEAT = 100.0
"""Seconds without a sign of a process after which JAX's runtime aborts all."""
_SOONER = 20.0
"""Seconds before that in which who is silent is still named everywhere."""
_LEAST = 10 * PERIOD


def check_heartbeat(seconds: float) -> float:
    """`seconds`, if a limit fits below it and it ends, else a ValueError."""
    if not _LEAST + _SOONER <= seconds <= 1e6:
        raise ValueError(
            f"`heartbeat` must lie in [{_LEAST + _SOONER:g}, 1e6] seconds, got"
            f" {seconds!r}. {HEARTBEAT:g} is JAX's own."
        )
    return seconds


class Watchdog:
    """Ends all processes of a job soon after one of them dies or stands still.

    Every second each process says, through the key-value store of JAX's runtime, that
    it is alive, at which step, and since when. Process 0 judges all of them, and all
    others whether process 0 still speaks. Once someone is at fault every process prints
    who, on which host, at which step and where in its program, and exits with status
    75, `pj.launch.FAULT`, a few seconds after the limit; one whose interpreter is held
    by a thread that never lets go of it prints its stacks, and exits with status 1.

    Nobody is at fault while a process is inside of `pause`, and nobody that waits
    inside of JAX while one compiles, or writes or reads a checkpoint. An exception that
    leaves the block is a fault too: it is named on all processes, where otherwise they
    would wait for the failed one for minutes.
    Leaving in good order waits for the others. One process alone is not watched.

    What it cannot do: say where a process was that died or is stopped; end one that is
    stopped; speak where process 0 dies, since JAX aborts all others at once. `pipejax
    launch` does the last two.

    Args:
      limit: seconds without a step, or without a word, that are too many.
      heartbeat: as `initialize` was given it; a limit above 80 needs a longer one.

    Raises:
      ValueError: for a limit of less than 10 seconds, or less than 20 below the
        heartbeat; for a heartbeat of less than 30.

    >>> with Watchdog(limit=60.0) as watchdog:
    ...     for number in range(3):
    ...         watchdog.step(number)
    """

    def __init__(self, limit: float = 60.0, *, heartbeat: float = HEARTBEAT) -> None:
        most = check_heartbeat(heartbeat) - _SOONER
        if not _LEAST <= limit <= most:
            raise ValueError(
                f"`limit` must lie in [{_LEAST:g}, {most:g}] seconds, since every"
                f" process is heard each {PERIOD:g} s, and JAX's runtime aborts all"
                f" after {heartbeat:g} s without a sign of one; got {limit!r}. What"
                " takes longer goes inside of `pause`; or give `initialize` and this a"
                " longer `heartbeat`."
            )
        self._limit = limit
        self._progress = Progress()
        self._patrol: Patrol | None = None

    def step(self, number: int) -> None:
        """Says that this process begins a step.

        Args:
          number: of the step, a whole number of any type.

        Raises:
          TypeError: for anything else.
        """
        self._progress.step = operator.index(number)
        self._progress.since = time.monotonic()

    @contextlib.contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Lets nobody be at fault while this process is at an evaluation, say."""
        before, self._progress.busy = self._progress.busy, what
        try:
            yield
        finally:
            self._progress.busy = before
            self._progress.since = time.monotonic()

    def __enter__(self) -> "Watchdog":
        self._progress.since = time.monotonic()
        client = distributed.global_state.client
        if client is not None and jax.process_count() > 1:
            rank, processes = jax.process_index(), jax.process_count()
            self._patrol = Patrol(
                Board.opened(client, rank),
                rank,
                processes,
                self._limit,
                self._progress,
                end,
            )
            self._patrol.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._patrol is None:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._progress.finished = True
        else:
            if not self._patrol.ending:  # and this is not what came of that
                traceback.print_exception(kind, error, trace)
            self._progress.since = time.monotonic()
            self._progress.failed = described(error)
        # After a failure it does not come back: the patrol ends the process.
        self._patrol.over.wait()
