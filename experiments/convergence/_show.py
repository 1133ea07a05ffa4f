"""Makes tables of the runs."""

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from ._change import change, diverged
from ._contenders import METHODS, OPTIMIZERS, TWICE
from ._runs import Run, Setting, of_seeds, pairs, tuned_rate

DELAYED = [name for name in TWICE if name != "K=1"]


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Returns the table of the methods of `TWICE` beside K=1, at every rate.

    A cell has the change from synchronous training: that of test loss in nats, then
    that of test accuracy in percentage points. Each is a mean with its standard error
    over pairs of runs, which start from the same parameters and see the same batches.
    """
    table = [["task", "optimizer", "rate", "K=1", *DELAYED]]
    for setting in compared(result, *result["factors"]):
        if synchronous := of_seeds(result, *setting, "K=1"):
            task, optimizer, rate = setting
            changes = (change(result, setting, name) for name in DELAYED)
            cells = ["" if each is None else str(each) for each in changes]
            ended = loss_and_accuracy(synchronous)
            table.append([task, optimizer, f"{rate:g}", ended, *cells])
    return table


def ends(result: dict[str, Any]) -> list[list[str]]:
    """Returns the table of test loss and accuracy of every method at the tuned rate.

    The values are means over seeds.
    """
    tuned = list(compared(result, 1.0))
    titles = (f"{task}, {optimizer}" for task, optimizer, _ in tuned)
    table = [["", "near K=1", *titles]]
    for name in METHODS:
        near = "" if name == "K=1" else count_near(result, name, tuned)
        runs = (of_seeds(result, *setting, name) for setting in tuned)
        table.append([name, near, *map(loss_and_accuracy, runs)])
    return table


def counts(result: dict[str, Any]) -> list[list[str]]:
    """Returns the table of how many tasks end near K=1, by optimizer and method."""
    table = [["optimizer", "rate", *DELAYED]]
    for optimizer, factor in itertools.product(OPTIMIZERS, result["factors"]):
        of_it = [found for found in compared(result, factor) if found[1] == optimizer]
        rate = "tuned" if factor == 1 else f"{factor:g} times"
        cells = (count_near(result, name, of_it) for name in DELAYED)
        table.append([optimizer, rate, *cells])
    return table


def count_near(result: dict[str, Any], method: str, settings: list[Setting]) -> str:
    """Returns how many settings end near K=1, such as `8 of 9`; see `Change.is_near`.

    Only settings that have been run are counted.
    """
    changes = [change(result, setting, method) for setting in settings]
    there = [each.is_near for each in changes if each is not None]
    return f"{sum(there)} of {len(there)}" if there else ""


def compared(result: dict[str, Any], *factors: float) -> Iterator[Setting]:
    """Yields the settings of the comparison, at `factors` times the tuned rates."""
    for (task, optimizer), factor in itertools.product(pairs(result["runs"]), factors):
        tuned = tuned_rate(task, optimizer, result["seeds"][0], result["runs"])
        yield task, optimizer, factor * tuned


def loss_and_accuracy(runs: list[Run]) -> str:
    """Returns the means of test loss and accuracy, such as `0.0513, 98.4 %`.

    The text is "diverged" if a run diverged, and empty if there are no runs.
    """
    if not runs:
        return ""
    if diverged(runs):
        return "diverged"
    loss, accuracy = (
        statistics.mean(run[name] for run in runs)
        for name in ("test_loss", "test_accuracy")
    )
    return f"{loss:.4f}, {100 * accuracy:.1f} %"
