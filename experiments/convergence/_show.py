"""Runs as tables."""

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from ._change import change, diverged
from ._contenders import METHODS, OPTIMIZERS, TWICE
from ._runs import Run, Setting, of_seeds, pairs, tuned_rate

DELAYED = [name for name in TWICE if name != "K=1"]


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Beside synchronous training: the methods of `TWICE`, at every rate.

    A cell is the change of test loss in nats and of test accuracy in points, mean and
    standard error over seeds that have the same parameters and batches at first.
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
    """Of every method test loss and accuracy at the tuned rate, means over seeds."""
    tuned = list(compared(result, 1.0))
    titles = (f"{task}, {optimizer}" for task, optimizer, _ in tuned)
    table = [["", "near K=1", *titles]]
    for name in METHODS:
        near = "" if name == "K=1" else count_near(result, name, tuned)
        runs = (of_seeds(result, *setting, name) for setting in tuned)
        table.append([name, near, *map(loss_and_accuracy, runs)])
    return table


def counts(result: dict[str, Any]) -> list[list[str]]:
    """Of each optimizer in how many tasks a method of `TWICE` ends near K=1."""
    table = [["optimizer", "rate", *DELAYED]]
    for optimizer, factor in itertools.product(OPTIMIZERS, result["factors"]):
        of_it = [found for found in compared(result, factor) if found[1] == optimizer]
        rate = "tuned" if factor == 1 else f"{factor:g} times"
        cells = (count_near(result, name, of_it) for name in DELAYED)
        table.append([optimizer, rate, *cells])
    return table


def count_near(result: dict[str, Any], method: str, settings: list[Setting]) -> str:
    """`8 of 9`, of those that have been run; see `Change.is_near`."""
    changes = [change(result, setting, method) for setting in settings]
    there = [each.is_near for each in changes if each is not None]
    return f"{sum(there)} of {len(there)}" if there else ""


def compared(result: dict[str, Any], *factors: float) -> Iterator[Setting]:
    """What methods were compared at, at these times the tuned rate."""
    for (task, optimizer), factor in itertools.product(pairs(result["runs"]), factors):
        tuned = tuned_rate(task, optimizer, result["seeds"][0], result["runs"])
        yield task, optimizer, factor * tuned


def loss_and_accuracy(runs: list[Run]) -> str:
    """`0.0513, 98.4 %`, means; or that one diverged; empty where there is none."""
    if not runs:
        return ""
    if diverged(runs):
        return "diverged"
    loss, accuracy = (
        statistics.mean(run[name] for run in runs)
        for name in ("test_loss", "test_accuracy")
    )
    return f"{loss:.4f}, {100 * accuracy:.1f} %"
