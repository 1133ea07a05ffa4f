"""Diagnoses which processes are at fault when a job stands still, by their reports."""

import dataclasses
import json
from collections.abc import Collection, Sequence
from typing import NamedTuple

# Seconds of silence that put a process at fault once another process has failed. A
# process that loses a connection fails at once, and the process that closed it falls
# silent. The fault lies with the silent process.
GRACE = 5.0
# A process that reports this many seconds after a failure, or later, did not cause it
# by its silence.
HEARD = 1.0
# Seconds in which a process whose connection has closed can say that it lives.
CLOSED = 0.7
# A process is silent after so many of its steps, and so many times the delay of its
# reports, but not before so many seconds.
STEPS, DELAYS, LEAST = 20, 5, 2.0
_REMEDY = "let all processes take as many batches, `train.fewest_batches(own)`"


@dataclasses.dataclass(frozen=True)
class ProcessReport:
    """The report of a process about itself, twice a second."""

    rank: int
    host: str
    count: int = 0  # of the reports sent, which grows while the process runs
    step: int = 0
    # Seconds since the last progress: the beginning of a step, a compilation, an access
    # to a checkpoint, or the end of a `Watchdog.pause`. After a failure, since then.
    since: float = 0.0
    busy: str = ""  # the work that may take any time, such as "compiling"
    paused: bool = False  # whether the process is inside of `Watchdog.pause`
    # Seconds without beginning a step, being busy, or waiting inside of JAX.
    outside: float = 0.0
    stack: str = ""  # the innermost frames of the main thread, after half of the limit
    failed: str = ""  # the exception that ends the process or has failed a save
    finished: bool = False  # whether it has left its watchdog in good order
    over: bool = False  # whether this is process 0 and has seen all processes finish
    pace: float = 0.0  # seconds of its longest recent step; 0 if that is not known yet
    cut: bool = False  # whether its connection to process 0 has closed while it lives

    @property
    def regular(self) -> bool:
        """Returns whether the pace of its steps is known and nothing else keeps it."""
        return self.pace > 0.0 and not self.busy

    def __str__(self) -> str:
        return f"process {self.rank} on {self.host}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ProcessReport":
        return cls(**json.loads(text))


class Seen(NamedTuple):
    """The newest report of a process, as another process sees it."""

    report: ProcessReport
    age: float  # seconds since it was first seen, by the clock of the one that sees it
    closed: float = 0.0  # seconds since the connection to the process has closed
    late: float = 0.0  # the most seconds by which a recent report came too late


def diagnose(seen: Sequence[Seen], absent: Collection[int], limit: float) -> str:
    """Returns a line for each process at fault, and its stack if it stands still.

    `absent` has the ranks of the processes that have not entered their watchdog. The
    first rule that applies decides.
    """
    # A process that has finished begins no more steps, and may have ended.
    working = [each for each in seen if not each.report.finished]
    failed = [each for each in seen if each.report.failed]
    # 1. A process without a report for `limit`, or for the time that its pace allows,
    # has died, was stopped or is cut off. If any process has failed, `GRACE` is enough,
    # because the failure came from the silence.
    if silent := silence(working, GRACE if failed else limit):
        return silent
    # 2. The process that failed first is at fault, unless it may have failed because of
    # a silent one, which rule 1 would still find.
    if failed:
        first = max(failed, key=_failed_ago)
        ago, report = _failed_ago(first), first.report
        others = [each.age for each in working if not each.report.failed]
        heard = all(age < ago - HEARD for age in others)
        failure = f"{report} failed at step {report.step}: {report.failed}"
        return failure if heard or ago > 2 * GRACE else ""
    reports = [each.report for each in working]
    # 3. While a process has paused, the others may wait for it for any time.
    if not reports or any(report.paused for report in reports):
        return ""
    # 4. This comes before rule 5: another process may be busy because of these, with a
    # checkpoint that all processes write together.
    if lost := [report for report in reports if report.outside > limit]:
        return "\n".join(map(_standstill, lost))
    # 5. Compiling may take any time. As long as any process makes progress, the job
    # does not stand still.
    if any(report.busy or report.since <= limit for report in reports):
        return ""
    # 6. All that have entered their watchdog stand still, and wait for the absent ones.
    if absent:
        names = ", ".join(map(str, sorted(absent)))
        return f"process {names} has not entered its `Watchdog`"
    # 7. The others wait inside of JAX for processes that are outside of it. If all are
    # inside, those at the earliest step hold up the others.
    outside = [report for report in reports if report.outside > 0]
    earliest = min(report.step for report in reports)
    slow = outside or [report for report in reports if report.step == earliest]
    finished = [each.report for each in seen if each.report.finished]
    # The others wait for a process that has left before them.
    early = [x for x in finished if not outside and x.step < earliest]
    return "\n".join(
        [
            *(f"{_left(x)}, before the others: {_REMEDY}" for x in early),
            *map(_standstill, slow),
            *(_left(x) for x in finished if x not in early),
        ]
    )


def _left(report: ProcessReport) -> str:
    return f"{report} has left its `Watchdog` at step {report.step}"


def _failed_ago(seen: Seen) -> float:
    return seen.age + seen.report.since


def silence(seen: Sequence[Seen], limit: float) -> str:
    """Returns a line for each process that has been silent for too long."""
    return "\n".join(
        f"{each.report} has said nothing for {each.age:.1f} s, last at step"
        f" {each.report.step}: it"
        f" {'died' if each.closed else 'died, was stopped, or is cut off'}"
        for each in seen
        if _is_silent(each, limit) and not each.report.finished
    )


def _is_silent(seen: Seen, limit: float) -> bool:
    return seen.closed > min(CLOSED, limit) or seen.age > patience(seen, limit)


def patience(seen: Seen, limit: float) -> float:
    """Returns the seconds without a report after which a process is silent.

    A process that takes its steps regularly is expected to report as regularly. Where
    other programs keep the cores busy, its reports come late, and one of them may come
    much later than those before it (see Hayashibara et al., "The phi accrual failure
    detector", 2004).
    """
    expected = max(LEAST, STEPS * seen.report.pace, DELAYS * seen.late)
    return min(limit, expected) if seen.report.regular else limit


def _standstill(report: ProcessReport) -> str:
    return (
        f"{report} has made no progress for {report.since:.0f} s, at step"
        f" {report.step}; it is at\n{report.stack}"
    )
