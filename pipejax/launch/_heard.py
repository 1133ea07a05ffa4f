"""The last reports of other processes, and how late these come."""

import time
from collections.abc import Iterable
from typing import NamedTuple

from ._diagnose import ProcessReport, Seen

_KEPT = 40  # the number of reports that say how late a process reports


class _Last(NamedTuple):
    report: ProcessReport
    heard: float  # the time of `time.monotonic()`
    # Seconds by which the last reports came too late, oldest first, and the most.
    delays: tuple[float, ...] = ()
    late: float = 0.0


class Heard:
    """The last report of each process, as one process has heard it."""

    def __init__(self) -> None:
        self._last: dict[int, _Last] = {}
        self._closed: dict[int, float] = {}  # when each connection closed, by rank

    def note(self, reports: Iterable[ProcessReport], period: float) -> None:
        """Notes reports, some of which may be known; new ones come every `period`."""
        for report in reports:
            # Ages are by the clock of this process, because clocks of hosts differ.
            now, last = time.monotonic(), self._last.get(report.rank)
            if last is None:
                self._last[report.rank] = _Last(report, now)
            elif last.report.count != report.count:
                delays = last.delays
                if last.report.regular and report.regular:
                    delays = (*delays, now - last.heard - period)[-_KEPT:]
                late = max([0.0, *delays])
                self._last[report.rank] = _Last(report, now, delays, late)

    def forgive(self) -> None:
        """Counts the silence of all processes anew, from now on."""
        now = time.monotonic()
        for rank, last in self._last.copy().items():
            self._last[rank] = last._replace(heard=now)

    def close(self, ranks: Iterable[int]) -> None:
        """Notes which connections have closed by now; the others are open."""
        now = time.monotonic()
        self._closed = {rank: self._closed.get(rank, now) for rank in ranks}

    def seen(self) -> list[Seen]:
        """Returns what is known of each process now."""
        now = time.monotonic()
        return [
            Seen(
                last.report,
                now - last.heard,
                self._closed_for(last.report, now),
                last.late,
            )
            for last in self._last.copy().values()
        ]

    def late(self, rank: int) -> float:
        """Returns the most seconds by which a recent report of a process was late."""
        return self._last[rank].late if rank in self._last else 0.0

    def _closed_for(self, report: ProcessReport, now: float) -> float:
        closed = self._closed.get(report.rank)
        # A process that says that its connection has closed lives.
        return 0.0 if closed is None or report.cut else now - closed
