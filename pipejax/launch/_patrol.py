"""What goes on beside the main thread of a process that is watched."""

import contextlib
import dataclasses
import faulthandler
import itertools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

import jax

from . import _where
from ._board import Board
from ._judge import GRACE, Beat, Seen, judge, silence

FAULT = 75
"""Exit status of all processes of a job that was ended: EX_TEMPFAIL of sysexits.h."""

PERIOD = 1.0
"""Seconds between two beats."""


@dataclasses.dataclass
class Progress:
    """What the main thread says of itself, as in `Beat`, but since what time."""

    step: int = 0
    since: float = 0.0
    busy: str = ""
    failed: str = ""
    finished: bool = False


class Patrol:
    """Says what this process does, hears what others do, and ends it if need be.

    Two threads: a call of the key-value store may take minutes to fail once process 0
    cannot be reached, so one makes these calls, and the other looks at the time.

    Attributes:
      over: set once all processes have left in good order.
      ending: whether this process is being ended.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        processes: int,
        limit: float,
        progress: Progress,
        end: Callable[[int, str], None],
    ) -> None:
        self.over = threading.Event()
        self._board = board
        self._rank = rank
        self._processes = processes
        self._limit = limit
        self._progress = progress
        self.ending = False
        self._end = end
        self._host = socket.gethostname()
        self._contact = time.monotonic()
        self._inside = progress.since
        self._newest: dict[int, tuple[Beat, float]] = {}
        self._verdict = ""
        self._accusation = ""
        self._save_failed: tuple[BaseException | None, float] = (None, 0.0)

    def start(self) -> None:
        """Starts both threads, which do not keep the process alive."""
        for work in (self._speak, self._look):
            threading.Thread(
                target=self._guarded, args=(work,), daemon=True, name="pipejax watchdog"
            ).start()

    def _guarded(self, work: Callable[[], None]) -> None:
        """A watchdog that fails is a fault: nobody would hear of any other."""
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            self._finally(
                f"the watchdog of process {self._rank} on {self._host} has failed:"
                f" {described(error)}"
            )

    def _speak(self) -> None:
        for count in itertools.count(1):
            over = self._is_over()
            # `_look` sees for how long there has been no contact.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._board.post(self._beat(count, over))
                if over:
                    break
                if self._accusation:
                    self._board.condemn(self._rank, self._accusation)
                self._note(self._board.beats(None if self._rank == 0 else 0))
                self._verdict = self._board.verdict()
                self._contact = time.monotonic()
            time.sleep(PERIOD)
        self.over.set()

    def _look(self) -> None:
        looked = time.monotonic()
        self._put_off()
        while not self.over.wait(PERIOD):
            self._put_off()
            if time.monotonic() - looked > GRACE:
                self._forgive()  # it was this process that was held up
            looked = time.monotonic()
            cut_off = time.monotonic() - self._contact
            if self._verdict:
                self._finally(self._verdict)
            elif cut_off > self._limit:
                self._finally(
                    "process 0, which holds JAX's key-value store, could not be reached"
                    f" from process {self._rank} on {self._host} for {cut_off:.0f} s,"
                    f" there at step {self._progress.step}",
                )
            elif not self._accusation:
                self._accusation = self._judged()
        faulthandler.cancel_dump_traceback_later()

    def _put_off(self) -> None:
        """Has this process ended a limit later, by when this is to be called again.

        Where a thread never lets go of the interpreter, `_look` stops as well. It ends
        before process 0 does, at which JAX aborts the others; and says so to descriptor
        2, since what stands for `sys.stderr` may have none.
        """
        faulthandler.dump_traceback_later(self._limit + PERIOD, exit=True, file=2)

    def _finally(self, verdict: str) -> None:
        self.ending = True
        self._end(self._rank, verdict)

    def _beat(self, count: int, over: bool) -> Beat:
        now = time.monotonic()
        where = _where.main_thread()
        if where.busy:
            self._progress.since = now
        if where.busy or where.waits or self._progress.busy:
            self._inside = now
        failed, since = self._failure(now)
        return Beat(
            self._rank,
            self._host,
            count,
            self._progress.step,
            since,
            self._progress.busy or where.busy,
            bool(self._progress.busy),
            now - max(self._inside, self._progress.since),
            where.stack if since > self._limit / 2 else "",
            failed,
            self._progress.finished,
            over,
        )

    def _failure(self, now: float) -> tuple[str, float]:
        """What this process ends with, if anything, and seconds since that or its step.

        An exception in a thread that saves is one once it has been there for a while:
        it may be about to be handled.
        """
        error = _where.failed_save()
        if error is not self._save_failed[0]:
            self._save_failed = error, now
        lasts = now - self._save_failed[1]
        if error is not None and lasts > 2 * GRACE and not self._progress.failed:
            return described(error), lasts
        return self._progress.failed, now - self._progress.since

    def _note(self, beats: list[Beat]) -> None:
        for beat in beats:
            before = self._newest.get(beat.rank)
            if before is None or before[0].count != beat.count:
                self._newest[beat.rank] = beat, time.monotonic()

    def _forgive(self) -> None:
        self._contact = time.monotonic()
        for rank, (beat, _) in self._newest.copy().items():
            self._newest[rank] = beat, self._contact

    def _judged(self) -> str:
        now = time.monotonic()
        seen = [Seen(beat, now - heard) for beat, heard in self._newest.copy().values()]
        if self._rank:  # after process 0 has had its turn
            limit, mine = self._limit + GRACE, self._progress
            waits = not (mine.busy or mine.finished) and now - mine.since > limit
            if not seen and waits:
                return "process 0 has not come as far as its watchdog"
            return silence(seen, limit)
        absent = set(range(self._processes)) - self._newest.keys()
        return judge(seen, absent, self._limit)

    def _is_over(self) -> bool:
        newest = [beat for beat, _ in self._newest.values()]
        if self._rank:
            return self._progress.finished and any(beat.over for beat in newest)
        all_here = len(newest) == self._processes
        return all_here and all(beat.finished for beat in newest)


def described(error: BaseException) -> str:
    """As in a traceback, without the notes that follow there, such as JAX's own."""
    form = traceback.TracebackException(type(error), error, None)
    form.__notes__ = None
    return [*form.format_exception_only()][-1].strip()


def end(rank: int, verdict: str) -> None:
    """Says so, and ends this process at once, whatever its other threads do."""
    sys.stderr.write(f"pipejax: this job is ended: {verdict}\n")
    sys.stderr.flush()
    sys.stdout.flush()
    if rank == 0:
        time.sleep(3 * PERIOD)  # the others read it here
    os._exit(FAULT)
