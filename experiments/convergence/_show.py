"""Runs as tables."""

import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

from ._contenders import METHODS, TWICE
from ._runs import Run, of_seeds, pairs, tuned_rate
from ._tasks import blind_guess

# How far from synchronous training the default may end: of one of the two, at K=2.
NATS, POINTS = 0.01, 0.2


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Beside synchronous training: the methods of `TWICE`, at every rate.

    A cell is the change of test loss in nats and of test accuracy in points, mean and
    standard error over seeds that have the same parameters and batches at first; a star
    where it misses `NATS` and `POINTS`, or twice that at K=3.
    """
    delayed = [name for name in TWICE if name != "K=1"]
    table = [["task", "optimizer", "rate", "K=1", *delayed]]
    for task, optimizer, rate in compared(result):
        synchronous = of_seeds(result, task, optimizer, rate, "K=1")
        if not synchronous:
            continue
        cells = [loss_and_accuracy(synchronous)]
        for name in delayed:
            runs = of_seeds(result, task, optimizer, rate, name)
            cells.append(change(runs, synchronous, METHODS[name].width))
        table.append([task, optimizer, f"{rate:g}", *cells])
    return table


def ends(result: dict[str, Any]) -> list[list[str]]:
    """Of every method test loss and accuracy at the tuned rate, means over seeds.

    The first column counts the cases that end near synchronous training, see `rows`.
    """
    tuned = list(compared({**result, "factors": [1.0]}))
    titles = (f"{task}, {optimizer}" for task, optimizer, _ in tuned)
    table = [["", "near K=1", *titles]]
    for method, how in METHODS.items():
        runs = [of_seeds(result, *setting, method) for setting in tuned]
        changes = [
            change(ended, of_seeds(result, *setting, "K=1"), how.width)
            for setting, ended in zip(tuned, runs, strict=True)
            if ended
        ]
        delayed = changes and method != "K=1"
        near = f"{sum(map(is_near, changes))} of {len(changes)}" if delayed else ""
        table.append([method, near, *map(loss_and_accuracy, runs)])
    return table


def compared(result: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Tasks, optimizers and learning rates at which methods were compared."""
    for (task, optimizer), factor in itertools.product(
        pairs(result["runs"]), result["factors"]
    ):
        tuned = tuned_rate(task, optimizer, result["seeds"][0], result["runs"])
        yield task, optimizer, factor * tuned


def loss_and_accuracy(runs: list[Run]) -> str:
    """`0.0513, 98.4 %`, means; or that one diverged; empty where there is none."""
    if not runs:
        return ""
    if diverged(runs):
        return "diverged"
    return f"{mean(runs, 'test_loss'):.4f}, {100 * mean(runs, 'test_accuracy'):.1f} %"


def change(runs: list[Run], synchronous: list[Run], width: int) -> str:
    """`+0.0012 ± 0.0004, -0.03 ± 0.02`; see `rows`."""
    if not runs:
        return ""
    if diverged(runs) or diverged(synchronous):
        return "diverged"
    nats = differences(runs, synchronous, "test_loss")
    points = [100 * x for x in differences(runs, synchronous, "test_accuracy")]
    allowed = (width - 1) * (1 + 1e-9)  # as much as the bar is within it
    within = (
        statistics.mean(nats) <= allowed * NATS
        or statistics.mean(points) >= -allowed * POINTS
    )
    of_nats, of_points = spread(nats, 4), spread(points, 2)
    return f"{of_nats}, {of_points}{'' if within else ' *'}"


def is_near(cell: str) -> bool:
    """Whether a `change` is within what the default may lose."""
    return not cell.endswith(("*", "diverged"))


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


def mean(runs: list[Run], name: str) -> float:
    """Over the seeds."""
    return statistics.mean(run[name] for run in runs)
