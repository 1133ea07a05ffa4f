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
"""Seconds of silence that put a process at fault once its lifeline has closed."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """A report of a process about itself, sent about once a second.

    Attributes:
      rank: The rank of the process.
      host: The name of the host on which the process runs.
      count: The number of beats that the process has sent. If it stops growing, the
        whole process has stopped.
      step: The last step that the process has begun.
      since: Seconds since the last progress of the process, or since its failure.
        Progress is the beginning of a step, a compilation, an access to a checkpoint,
        or the end of a `Watchdog.pause`.
      busy: The work of the process that may take any time, such as "compiling". Empty
        if there is none.
      paused: Whether the process is inside of `Watchdog.pause`.
      outside: Seconds that the process has spent in its own code: without beginning a
        step, without being busy, and without waiting inside of JAX for a device or for
        other processes. 0 if the process is busy or waits now.
      stack: The innermost frames of the main thread. Empty until `since` exceeds half
        of the watchdog's limit.
      failed: The exception that ends the process, or with which a checkpoint has
        failed. Empty if there is none.
      finished: Whether the process has left its watchdog in good order.
      over: Whether this is process 0 and it has seen all processes finish.
    """

    rank: int
    host: str
    count: int = 0
    step: int = 0
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
      beat: The beat.
      age: Seconds since the beat was first seen, by the clock of the process that sees
        it.
      closed: Whether the lifeline of the process has closed.
    """

    beat: Beat
    age: float
    closed: bool = False


def judge(seen: Sequence[Seen], absent: Collection[int], limit: float) -> str:
    """Finds the processes at fault, and says what is wrong with them.

    The rules are tried in this order, and the first that applies decides. Processes
    that have finished are never at fault for standing still or being silent.

    1. Processes whose beats are older than `limit` are at fault: they have died, were
       stopped or are cut off. If any process has failed, `GRACE` seconds are enough,
       because the failure came from the silence. For a process whose lifeline has
       closed, `CLOSED` seconds are enough, because it has died.
    2. If processes have failed, the one that failed first is at fault. It is named
       `2 * GRACE` seconds after its failure, so that rule 1 can apply before that.
    3. While a process has paused, no process is at fault.
    4. Processes that have spent more than `limit` outside of JAX are at fault. Another
       process may be busy because of them, with a checkpoint that all write together.
    5. While a process is busy, or has made progress within `limit`, no process is at
       fault.
    6. Processes that have not entered their watchdog are at fault.
    7. Processes that are outside of JAX are at fault, because the others wait for them
       inside of JAX. If all are inside of JAX, those at the earliest step are at fault.

    Args:
      seen: The newest beat of every process that has entered its watchdog.
      absent: The ranks of all other processes.
      limit: Seconds without progress, or without a beat, that are too many.

    Returns:
      A line for each process at fault, followed by its stack if it stands still. An
      empty string if no process is at fault.
    """
    working = [each for each in seen if not each.beat.finished]
    failed = [each.beat for each in seen if each.beat.failed]
    if silent := silence(working, GRACE if failed else limit):
        return silent
    if failed:
        first = max(failed, key=lambda beat: beat.since)
        return _failure(first) if first.since > 2 * GRACE else ""
    beats = [each.beat for each in working]
    if not beats or any(beat.paused for beat in beats):
        return ""
    if lost := [beat for beat in beats if beat.outside > limit]:
        return "\n".join(map(_standstill, lost))
    if any(beat.busy or beat.since <= limit for beat in beats):
        return ""
    if absent:
        names = ", ".join(map(str, sorted(absent)))
        return f"process {names} has not entered its `Watchdog`"
    outside = [beat for beat in beats if beat.outside > 0]
    earliest = min(beat.step for beat in beats)
    return "\n".join(
        map(_standstill, outside or [beat for beat in beats if beat.step == earliest])
    )


def silence(seen: Sequence[Seen], limit: float) -> str:
    """Returns a line for each process that has sent no beat for `limit` seconds.

    `CLOSED` seconds are enough for a process whose lifeline has closed.
    Processes that have finished need not send any.
    """
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
