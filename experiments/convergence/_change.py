"""What a delay changed, beside synchronous training."""

import math
import statistics
from typing import Any, NamedTuple

from ._contenders import METHODS
from ._runs import Run, Setting, of_seeds
from ._tasks import blind_guess

# How far from synchronous training the default may end: of one of the two, at K=2.
NATS, POINTS = 0.01, 0.2


class Change(NamedTuple):
    """Of a task, an optimizer, a rate and a method.

    Attributes:
      width: of the pipeline.
      nats: of test loss, seed by seed; none if a run of either diverged.
      points: of test accuracy, likewise.
    """

    width: int
    nats: list[float]
    points: list[float]

    @property
    def is_near(self) -> bool:
        """Whether it is within one of `NATS` and `POINTS`, or twice that at K=3."""
        if not self.nats:
            return False
        allowed = (self.width - 1) * (1 + 1e-9)  # as much as the bar is within it
        return (
            statistics.mean(self.nats) <= allowed * NATS
            or statistics.mean(self.points) >= -allowed * POINTS
        )

    def __str__(self) -> str:
        """`+0.0123 ± 0.0004, -0.43 ± 0.02 *`, with a star where it is not near."""
        if not self.nats:
            return "diverged"
        star = "" if self.is_near else " *"
        return f"{spread(self.nats, 4)}, {spread(self.points, 2)}{star}"


def change(result: dict[str, Any], setting: Setting, method: str) -> Change | None:
    """None where it has not been run."""
    runs, synchronous = (of_seeds(result, *setting, x) for x in (method, "K=1"))
    if not runs or not synchronous:
        return None
    width = METHODS[method].width
    if diverged(runs) or diverged(synchronous):
        return Change(width, [], [])
    nats = differences(runs, synchronous, "test_loss")
    parts = differences(runs, synchronous, "test_accuracy")
    return Change(width, nats, [100 * part for part in parts])


def differences(runs: list[Run], others: list[Run], name: str) -> list[float]:
    """Seed by seed, as far as both have been run."""
    before = {run["seed"]: run[name] for run in others}
    return [run[name] - before[run["seed"]] for run in runs if run["seed"] in before]


def spread(values: list[float], digits: int) -> str:
    """`+1.23 ± 0.45`: mean and its standard error, where there are two or more."""
    middle = f"{statistics.mean(values):+.{digits}f}"
    if len(values) < 2:
        return middle
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{middle} ± {error:.{digits}f}"


def diverged(runs: list[Run]) -> bool:
    """Whether one ended with no finite loss, or no better than a blind guess."""
    return any(
        run["test_loss"] is None or run["test_loss"] > 0.999 * blind_guess(run["task"])
        for run in runs
    )
