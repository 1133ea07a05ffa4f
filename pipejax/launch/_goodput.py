"""Says how much of a job's time ended up in its parameters, and where the rest went.

*Goodput* is the time of all different steps, each stretch of them up to as long as the
median step would take for it, divided by the time of the whole job. The rest of the
time has these parts:

- first start: all before the first step, and what this step took above the median,
- again: steps that were done a second time, because no checkpoint or snapshot had them,
- slow steps: what steps took above the median,
- saves: checkpoints and snapshots, as long as they stopped the training,
- detection: from the last step before a fault until the processes were started again,
- outage: the part of it in which a link was cut off, if that is known,
- start: imports and the roll call of a restart,
- build: everything between joining and the first step, but restoring,
- restore: reading a checkpoint or a snapshot,
- compilation: what the first step of a restart took above the median,
- end: from the last step to the end.
"""

import contextlib
import json
import pathlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

Event = dict[str, Any]
PARTS = (
    *("useful", "first start", "again", "slow steps", "saves", "detection"),
    *("outage", "start", "build", "restore", "compilation", "end"),
)


class Goodput(NamedTuple):
    """Where the time of a job went.

    Attributes:
      seconds: The time of the job.
      step: The median time of a step, in seconds.
      steps: The number of different steps.
      parts: The seconds of each part, which add up to `seconds`.
    """

    seconds: float
    step: float
    steps: int
    parts: dict[str, float]

    @property
    def share(self) -> float:
        """Returns the goodput, from 0 to 1."""
        return self.parts["useful"] / self.seconds

    def __str__(self) -> str:
        rest = sorted(self.parts.items(), key=lambda part: -part[1])
        shown = [
            f"{name} {100 * each / self.seconds:.1f} %"
            for name, each in rest
            if name != "useful" and each >= 0.001 * self.seconds
        ]
        return (
            f"goodput {100 * self.share:.1f} % of {self.seconds:.0f} s, {self.steps}"
            f" steps of {self.step:.3g} s; {', '.join(shown)}"
        )


def events(path: pathlib.Path) -> list[Event]:
    """Reads the timeline of a process, with all its attempts."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(errors="replace").splitlines():
        # The last line may be under way, and a full disk may have cut off another.
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def goodput(
    timelines: Sequence[Sequence[Event]],
    begun: float,
    until: float,
    cut_off: Sequence[tuple[float, float]] = (),
) -> Goodput | None:
    """Splits the time of a job into its parts.

    Processes take their steps together, so those of the first stand for all.

    Args:
      timelines: The events of each process.
      begun: When the job was started.
      until: When it ended, or now.
      cut_off: From when to when a link was cut off.

    Returns:
      The goodput; `None` with fewer than two steps, or if their numbers fall.
    """
    attempts = _attempts(timelines[0])
    if any(b["step"] < a["step"] for steps in attempts for a, b in pairwise(steps)):
        return None
    spans = [[_Span.of(*pair) for pair in pairwise(steps)] for steps in attempts]
    firsts = [span for each in spans for span in each[:1]]
    others = [span for each in spans for span in each[1:]]
    if not firsts:
        return None
    usual = _median(others or firsts)
    parts = dict.fromkeys(PARTS, 0.0)
    last, seen, done = attempts[0][0]["at"], attempts[0][0]["step"], 0
    parts["first start"] = last - begun
    for number, (steps, each) in enumerate(zip(attempts, spans, strict=True)):
        if number > 0:
            _gap(timelines, last, steps[0]["at"], cut_off, parts)
        rest = "compilation" if number else "first start"
        for event, span in zip(steps[1:], each, strict=True):
            new = min(span.steps, max(0, event["step"] - seen))
            # Steps may also be quicker than usual: after a warm-up, for example.
            taken = min(usual * span.steps, span.seconds)
            parts["useful"] += taken * new / span.steps
            parts["again"] += taken * (1 - new / span.steps)
            parts["saves"] += span.saves
            parts[rest] += span.seconds - taken
            done, rest = done + new, "slow steps"
            seen = max(seen, event["step"])
        last, seen = steps[-1]["at"], max(seen, steps[-1]["step"])
    parts["end"] = until - last
    return Goodput(until - begun, usual, done, parts)


def _median(spans: Sequence["_Span"]) -> float:
    """Returns the median time of a step, where a span counts as often as its steps."""
    each = sorted((span.seconds / span.steps, span.steps) for span in spans)
    before = accumulate(steps for _, steps in each)
    half = sum(steps for _, steps in each) / 2
    return next(x for (x, _), n in zip(each, before, strict=True) if n >= half)


class _Span(NamedTuple):
    """Some steps of an attempt, between two events."""

    steps: int
    seconds: float  # without saves
    saves: float

    @classmethod
    def of(cls, first: Event, second: Event) -> "_Span":
        saves = second["saves"] - first["saves"]
        return cls(
            second["step"] - first["step"],
            second["at"] - first["at"] - saves,
            saves,
        )


def _attempts(timeline: Sequence[Event]) -> list[list[Event]]:
    """Returns the steps of each attempt, and the seconds of saves until each step."""
    found: list[list[Event]] = [[]]
    saves = 0.0
    for event in timeline:
        if event["what"] == "begun":
            found.append([])
        elif event["what"] == "saved":
            saves += event["seconds"]
        # A number that is noted again, such as that of the first step of a second
        # watchdog, is the same step.
        elif event["what"] == "step" and event["step"] != _last_step(found[-1]):
            found[-1].append({**event, "saves": saves})
    return [steps for steps in found if steps]


def _last_step(steps: Sequence[Event]) -> int | None:
    return steps[-1]["step"] if steps else None


def _gap(
    timelines: Sequence[Sequence[Event]],
    last: float,
    until: float,
    cut_off: Sequence[tuple[float, float]],
    parts: dict[str, float],
) -> None:
    """Adds the time between two attempts to the parts."""
    inside = [e for each in timelines for e in each if last < e["at"] <= until]

    def latest(what: str, since: float) -> float:
        return max([e["at"] for e in inside if e["what"] == what], default=since)

    ends = {"detection": latest("begun", last)}
    met = latest("joined", ends["detection"])
    back = [end for start, end in cut_off if last <= end and start <= until]
    ends["outage"] = min(max([ends["detection"], *back]), met)
    ends["start"] = met
    restored = latest("restored", met)
    taken = [e["seconds"] for e in inside if e["what"] == "restored"]
    restore = min(max(taken, default=0.0), restored - met)
    for name, end in ends.items():
        parts[name] += end - last
        last = end
    parts["restore"] += restore
    parts["build"] += until - last - restore
