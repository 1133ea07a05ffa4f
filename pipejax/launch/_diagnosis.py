"""Finds the processes that are at fault when a job stands still, from their beats."""

import dataclasses
import json
from collections.abc import Collection, Sequence
from typing import NamedTuple

GRACE = 5.0
"""Seconds of silence that put a process at fault once another process has failed.

A process that loses a connection fails at once, and the process that closed the
connection falls silent. The fault lies with the silent process.
"""
CLOSED = 3.0
"""Seconds of silence that put a process at fault once its connection has closed."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """A report of a process about itself, sent about once a second.

    Attributes:
      count: The number of beats sent. If it stops growing, the whole process has
        stopped.
      since: Seconds since the last progress of the process, or since its failure.
      busy: The work that may take any time, such as "compiling", or an empty string.
      paused: Whether the process is inside of `Watchdog.pause`.
      outside: Seconds without beginning a step, being busy, or waiting inside of JAX.
      stack: The innermost frames of the main thread; empty for half of the limit.
      failed: The exception that ends the process or has failed a save, or an empty
        string.
      finished: Whether the process has left its watchdog in good order.
      over: Whether this is process 0 and it has seen all processes finish.
    """

    rank: int
    host: str
    count: int = 0
    step: int = 0
    # Progress is the beginning of a step, a compilation, an access to a checkpoint, or
    # the end of a `Watchdog.pause`.
    since: float = 0.0
    busy: str = ""
    paused: bool = False
    outside: float = 0.0
    stack: str = ""
    failed: str = ""
    finished: bool = False
    over: bool = False

    def __str__(self) -> str:
        return f"process {self.rank} on {self.host}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Beat":
        return cls(**json.loads(text))


class Seen(NamedTuple):
    """The newest beat of a process, as another process sees it.

    Attributes:
      age: Seconds since the beat was first seen, by the clock of the one that sees it.
      closed: Whether the connection to the process has closed.
    """

    beat: Beat
    age: float
    closed: bool = False


def diagnose(seen: Sequence[Seen], absent: Collection[int], limit: float) -> str:
    """Finds the processes at fault, and says what is wrong with them.

    `seen` has the newest beat of every process that has entered its watchdog, and
    `absent` the ranks of all others. Returns a line for each process at fault, followed
    by its stack if it stands still, or an empty string. The first rule that applies
    decides.
    """
    # A process that has finished begins no more steps, and may have ended.
    working = [each for each in seen if not each.beat.finished]
    failed = [each.beat for each in seen if each.beat.failed]
    # 1. A process without a beat for `limit` has died, was stopped or is cut off. If
    # any process has failed, `GRACE` is enough, because the failure came from the
    # silence.
    if silent := silence(working, GRACE if failed else limit):
        return silent
    # 2. The process that failed first is at fault. The diagnosis waits for `2 * GRACE`,
    # within which rule 1 can still find a silent process that is the cause.
    if failed:
        first = max(failed, key=lambda beat: beat.since)
        return _failure(first) if first.since > 2 * GRACE else ""
    beats = [each.beat for each in working]
    # 3. While a process has paused, the others may wait for it for any time.
    if not beats or any(beat.paused for beat in beats):
        return ""
    # 4. This comes before rule 5: another process may be busy because of these, with a
    # checkpoint that all processes write together.
    if lost := [beat for beat in beats if beat.outside > limit]:
        return "\n".join(map(_standstill, lost))
    # 5. Compiling may take any time. As long as any process makes progress, the job
    # does not stand still.
    if any(beat.busy or beat.since <= limit for beat in beats):
        return ""
    # 6. All that have entered their watchdog stand still, and wait for the absent ones.
    if absent:
        names = ", ".join(map(str, sorted(absent)))
        return f"process {names} has not entered its `Watchdog`"
    # 7. The others wait inside of JAX for processes that are outside of it. If all are
    # inside, those at the earliest step hold up the others.
    outside = [beat for beat in beats if beat.outside > 0]
    earliest = min(beat.step for beat in beats)
    return "\n".join(
        map(_standstill, outside or [beat for beat in beats if beat.step == earliest])
    )


def silence(seen: Sequence[Seen], limit: float) -> str:
    """Returns a line for each process that has sent no beat for `limit` seconds."""
    return "\n".join(
        f"{beat} has said nothing for {age:.0f} s, last at step {beat.step}: it"
        f" {'died' if closed else 'died, was stopped, or is cut off'}"
        for beat, age, closed in seen
        if age > (min(CLOSED, limit) if closed else limit) and not beat.finished
    )


def _failure(beat: Beat) -> str:
    return f"{beat} failed at step {beat.step}: {beat.failed}"


def _standstill(beat: Beat) -> str:
    return (
        f"{beat} has made no progress for {beat.since:.0f} s, at step {beat.step};"
        f" it is at\n{beat.stack}"
    )
