"""Computes what a delay changes, compared with synchronous training."""

import math
import statistics
from typing import Any, NamedTuple

from ._runs import Run, Setting, of_seeds
from ._tasks import blind_guess

# A method is near synchronous training if it keeps one of the two limits, at K=2.
NATS, POINTS = 0.01, 0.2


class Change(NamedTuple):
    """The change that a method makes for one task, optimizer and rate.

    Attributes:
      width: The width of the pipeline.
      nats: The change of test loss in nats, for each seed. It is empty if a run of the
        method or of synchronous training diverged.
      points: The change of test accuracy in percentage points, for each seed. It is
        empty in the same case.
    """

    width: int
    nats: list[float]
    points: list[float]

    @property
    def is_near(self) -> bool:
        """Returns whether one of the limits is kept; at K=3, they are twice as wide."""
        if not self.nats:
            return False
        allowed = (self.width - 1) * (1 + 1e-9)  # the limit itself counts as near
        return (
            statistics.mean(self.nats) <= allowed * NATS
            or statistics.mean(self.points) >= -allowed * POINTS
        )

    def __str__(self) -> str:
        """Returns `+0.0123 ± 0.0004, -0.43 ± 0.02 *`; the star means not near."""
        if not self.nats:
            return "diverged"
        star = "" if self.is_near else " *"
        return f"{spread(self.nats, 4)}, {spread(self.points, 2)}{star}"


def change(result: dict[str, Any], setting: Setting, method: str) -> Change | None:
    """Returns the change that a method makes, or `None` if it has not been run."""
    runs, synchronous = (of_seeds(result, *setting, x) for x in (method, "K=1"))
    if not runs or not synchronous:
        return None
    width = int(method.removeprefix("K=")[0])
    if diverged(runs) or diverged(synchronous):
        return Change(width, [], [])
    nats = differences(runs, synchronous, "test_loss")
    parts = differences(runs, synchronous, "test_accuracy")
    return Change(width, nats, [100 * part for part in parts])


def differences(runs: list[Run], others: list[Run], name: str) -> list[float]:
    """Returns the differences for each seed for which both methods have been run."""
    before = {run["seed"]: run[name] for run in others}
    return [run[name] - before[run["seed"]] for run in runs if run["seed"] in before]


def spread(values: list[float], digits: int) -> str:
    """Returns `+1.23 ± 0.45`, the mean and its standard error.

    A single value has no standard error.
    """
    middle = f"{statistics.mean(values):+.{digits}f}"
    if len(values) < 2:
        return middle
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{middle} ± {error:.{digits}f}"


def diverged(runs: list[Run]) -> bool:
    """Returns whether a run ended without a finite loss or as bad as a blind guess."""
    return any(
        run["test_loss"] is None or run["test_loss"] > 0.999 * blind_guess(run["task"])
        for run in runs
    )
