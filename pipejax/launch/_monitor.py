"""The threads of a watchdog, which run beside the main thread of their process.

They post the reports of the process, diagnose those of other processes, and end the
process when any process of the job is at fault.
"""

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
from collections import deque
from collections.abc import Callable

import jax

from pipejax._internal import leaving

from . import _liveness, _where
from ._diagnose import (
    GRACE,
    LEAST,
    ProcessReport,
    Seen,
    diagnose,
    patience,
    silence,
)
from ._heard import Heard
from ._kv_store import KeyValueStore

FAULT = 75
"""The exit status of all processes of a job that a `Watchdog` has ended.

75 is EX_TEMPFAIL of sysexits.h.
"""

PERIOD = 0.5  # seconds between two reports of a process
_LOOK = 0.05  # seconds between two looks at connections and reports
_LAST = 3.0  # seconds after a diagnosis until process 0 ends at the latest
_PACE = 20  # the number of steps that say how long a step takes


@dataclasses.dataclass
class Progress:
    """The part of a `ProcessReport` that the thread of the training writes."""

    # The identifier of this thread.
    thread: int = dataclasses.field(default_factory=threading.get_ident)
    step: int = 0
    since: float = 0.0  # the time of `time.monotonic()`
    stepped: bool = False  # whether `since` is the beginning of a step
    # Seconds of the last steps without other work between, oldest first.
    paces: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=_PACE))
    busy: str = ""  # what `Watchdog.pause` was given
    failed: str = ""
    finished: bool = False


@dataclasses.dataclass(eq=False)
class Monitor:
    """Posts the reports of a process, diagnoses those of others, and ends it."""

    store: KeyValueStore
    rank: int
    processes: int
    limit: float
    progress: Progress
    end: Callable[[int, str], None]  # ends the process, given its rank and a diagnosis
    # Set once all processes have left in good order.
    over: threading.Event = dataclasses.field(default_factory=threading.Event)
    ending: bool = False  # whether the monitor is ending its process

    def __post_init__(self) -> None:
        self._host = socket.gethostname()
        self._contact = time.monotonic()
        self._inside = self.progress.since
        self._heard = Heard()
        self._diagnosis = ""
        self._found = ""
        self._cut = False  # whether the connection to process 0 has closed
        self._hurry = threading.Event()
        self._put_off_at = 0.0
        self._save_failed: tuple[BaseException | None, float] = (None, 0.0)

    def start(self) -> None:
        # A call of the key-value store may take minutes to fail once process 0 cannot
        # be reached. `_speak` makes these calls, and `_look` watches the time.
        for work in (self._speak, self._look):
            threading.Thread(
                target=self._guarded, args=(work,), daemon=True, name="pipejax watchdog"
            ).start()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Runs `work`. An exception ends the process, which is no longer watched."""
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            self._finally(
                f"the watchdog of process {self.rank} on {self._host} has failed:"
                f" {described(error)}"
            )

    def _speak(self) -> None:
        """Posts reports and reads what others have posted, until all have finished."""
        for count in itertools.count(1):
            over = self._is_over()
            # `_look` checks for how long the store has been out of reach.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.store.post(self._report(count, over))
                if over:
                    break
                if self._found:
                    self.store.publish(self.rank, self._found)
                # Process 0 diagnoses all. The others check only that process 0 is
                # alive, so that n processes read 2 n reports a second, and not n^2.
                reports = self.store.reports(None if self.rank == 0 else 0)
                self._heard.note(reports, PERIOD)
                self._diagnosis = self.store.diagnosis()
                self._contact = time.monotonic()
            began = time.monotonic()
            self._hurry.wait(PERIOD)
            self._hurry.clear()
            self._if_held_up(time.monotonic() - began - PERIOD)
        self.over.set()

    def _look(self) -> None:
        looked = time.monotonic()
        self._put_off()
        while not self.over.wait(_LOOK):
            self._put_off()
            self._if_held_up(time.monotonic() - looked)
            looked = time.monotonic()
            self._look_at_connections()
            cut_off = time.monotonic() - self._contact
            if self._diagnosis:
                self._finally(self._diagnosis)
            elif cut_off > self._patience():
                self._finally(
                    "process 0, which holds JAX's key-value store, could not be reached"
                    f" from process {self.rank} on {self._host} for {cut_off:.0f} s;"
                    f" process {self.rank} is at step {self.progress.step}",
                )
            elif not self._found and (found := self._diagnosed()):
                self._found = found
                if self.rank == 0:
                    _liveness.send(found)
                self._hurry.set()  # publish it
        faulthandler.cancel_dump_traceback_later()

    def _if_held_up(self, seconds: float) -> None:
        """Counts all silence anew if this process stood still for some seconds."""
        # The shortest silence of a fault must be longer.
        if seconds > LEAST / 2:
            self._contact = time.monotonic()
            self._heard.forgive()

    def _look_at_connections(self) -> None:
        closed = _liveness.closed()
        if self.rank == 0:
            self._heard.close(closed)
            return
        self._diagnosis = self._diagnosis or _liveness.received()
        if not self._cut and 0 in closed:
            # If process 0 has ended, nobody hears it.
            self._cut = True
            self._hurry.set()

    def _put_off(self) -> None:
        """Postpones the forced end of this process to `limit + PERIOD` from now on."""
        # If a thread never releases the interpreter, `_look` stops and no longer
        # postpones this. The process must end before process 0 does, because JAX aborts
        # all others at that moment. File descriptor 2 is given since an object in place
        # of `sys.stderr` may have none. Each call starts a thread, so there is only one
        # in each period.
        if time.monotonic() - self._put_off_at > PERIOD:
            self._put_off_at = time.monotonic()
            seconds = self.limit + 2 * PERIOD
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)

    def _finally(self, diagnosis: str) -> None:
        self.ending = True
        if self.rank == 0:
            # A silent process hears no diagnosis, so process 0 does not wait for it.
            # After about `limit` it does: the process may be printing its stacks, see
            # `_put_off`.
            most = self.limit + 2 * PERIOD - _LAST
            _liveness.leave_out(
                {
                    each.report.rank
                    for each in self._heard.seen()
                    if patience(each, GRACE) < each.age < most
                }
            )
        self.end(self.rank, diagnosis)

    def _report(self, count: int, over: bool) -> ProcessReport:
        now = time.monotonic()
        where = _where.thread(self.progress.thread)
        if where.busy:
            self.progress.since, self.progress.stepped = now, False
        # `outside` counts from the last moment of work or waiting inside of JAX.
        if where.busy or where.waits or self.progress.busy:
            self._inside = now
        failed, since = self._failure(now)
        return ProcessReport(
            self.rank,
            self._host,
            count,
            self.progress.step,
            since,
            self.progress.busy or where.busy,
            bool(self.progress.busy),
            now - max(self._inside, self.progress.since),
            # A stack is costly to format and to send, and is shown only in a diagnosis.
            where.stack if since > self.limit / 2 else "",
            failed,
            self.progress.finished,
            over,
            self._pace(),
            self._cut,
        )

    def _pace(self) -> float:
        """Returns the seconds of the longest of the last steps, 0 with too few."""
        paces = [*self.progress.paces]
        return max(paces) if len(paces) == _PACE else 0.0

    def _failure(self, now: float) -> tuple[str, float]:
        """Returns the failure and the seconds since it.

        Without a failure, it returns an empty text and the seconds since progress.
        """
        error = _where.failed_save()
        if error is not self._save_failed[0]:
            self._save_failed = error, now
        lasts = now - self._save_failed[1]
        # The thread that has saved may be about to handle this exception itself.
        if error is not None and lasts > 2 * GRACE and not self.progress.failed:
            return described(error), lasts
        return self.progress.failed, now - self.progress.since

    def _diagnosed(self) -> str:
        seen = self._heard.seen()
        if self.rank:  # process 0 diagnoses first
            limit, mine = self.limit + GRACE, self.progress
            waits = not (mine.busy or mine.finished)
            if not seen and waits and time.monotonic() - mine.since > limit:
                return "process 0 has not entered its `Watchdog`"
            return silence(seen, limit)
        absent = set(range(self.processes)) - {each.report.rank for each in seen}
        return diagnose(seen, absent, self.limit)

    def _patience(self) -> float:
        """Returns the seconds without contact after which this process ends."""
        mine = ProcessReport(
            self.rank, self._host, busy=self.progress.busy, pace=self._pace()
        )
        # Process 0 diagnoses first.
        late = self._heard.late(0)
        return patience(Seen(mine, 0.0, late=late), self.limit) + 2 * PERIOD

    def _is_over(self) -> bool:
        reports = [each.report for each in self._heard.seen()]
        if self.rank:
            return self.progress.finished and any(report.over for report in reports)
        all_here = len(reports) == self.processes
        return all_here and all(report.finished for report in reports)


def described(error: BaseException) -> str:
    """Returns the last line of a traceback, without the notes after it."""
    form = traceback.TracebackException(type(error), error, None)
    # JAX adds notes of its own to exceptions that leave a jitted function.
    form.__notes__ = None
    return [*form.format_exception_only()][-1].strip()


def end(rank: int, diagnosis: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"pipejax: this job is ended: {diagnosis}\n")
    leaving.flush()
    # The store ends with process 0: the others must have the diagnosis before that.
    until = time.monotonic() + _LAST
    while rank == 0 and time.monotonic() < until and not _liveness.all_closed():
        time.sleep(_LOOK)
    os._exit(FAULT)
