"""Whose fault it is that a job stands still, from what its processes last said."""

import dataclasses
import json
from collections.abc import Collection, Sequence
from typing import NamedTuple

GRACE = 5.0
"""Seconds in which whoever caused another's failure falls silent itself."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a process says every second or so.

    Attributes:
      rank: which it is.
      host: its host's name.
      count: of its beats so far; where this stands still, so does all of the process.
      step: the last that it has begun.
      since: seconds since it began that, or failed.
      busy: what it is at that may take any time, such as compiling; empty otherwise.
      paused: whether it has said so itself.
      outside: seconds in which it began no step, nor was busy, nor inside of JAX, where
        it waits for a device or for other processes; 0 if it is so now.
      stack: of its threads, once `since` is long.
      failed: the exception it ends with, or has failed to save with; empty otherwise.
      finished: whether it has left in good order.
      over: whether it is process 0 and has seen all others leave.
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
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Beat":
        """What `to_json` has written."""
        return cls(**json.loads(text))


class Seen(NamedTuple):
    """A beat, and how long it has been the newest, in seconds of who looks."""

    beat: Beat
    age: float


def judge(seen: Sequence[Seen], absent: Collection[int], limit: float) -> str:
    """What is wrong, a line for each process at fault; empty if nothing is.

    - A process whose beat is older than `limit` has died, was stopped or is cut off.
      Once another has failed, `GRACE` is enough: it failed because of this one.
    - Otherwise one that has failed, the first.
    - Otherwise nobody, as long as one has paused.
    - Otherwise those that have been outside of JAX for longer than `limit`: whoever is
      busy may be so because of them, at a checkpoint that all write together.
    - Otherwise nobody, as long as one is busy, or began a step within `limit`.
    - Otherwise those that are somewhere else than inside of JAX: the rest wait for
      them. If there are none, those at the earliest step.

    Args:
      seen: of every process that is being watched.
      absent: ranks of those that are not yet.
      limit: seconds.
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
        return f"process {names} has not come as far as its watchdog"
    outside = [beat for beat in beats if beat.outside > 0]
    earliest = min(beat.step for beat in beats)
    return "\n".join(
        map(_standstill, outside or [beat for beat in beats if beat.step == earliest])
    )


def silence(seen: Sequence[Seen], limit: float) -> str:
    """A line for each process that has said nothing for `limit` seconds.

    Whoever has finished need not.
    """
    return "\n".join(
        f"{beat} has said nothing for {age:.0f} s, last at step {beat.step}: it died,"
        " was stopped, or is cut off"
        for beat, age in seen
        if age > limit and not beat.finished
    )


def _failure(beat: Beat) -> str:
    return f"{beat} failed at step {beat.step}: {beat.failed}"


def _standstill(beat: Beat) -> str:
    return (
        f"{beat} has made no progress for {beat.since:.0f} s, at step {beat.step};"
        f" it is at\n{beat.stack}"
    )
