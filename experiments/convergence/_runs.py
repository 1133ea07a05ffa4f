"""Identifies runs, and finds them among others."""

import itertools
import math
from typing import Any

from ._contenders import OPTIMIZERS

Run = dict[str, Any]
Setting = tuple[str, str, float]  # task, optimizer, rate


def tuned_rate(task: str, optimizer: str, seed: int, runs: list[Run]) -> float:
    """Returns the rate at which synchronous training has the lowest test loss."""
    swept = [
        run
        for rate in OPTIMIZERS[optimizer].rates
        if (run := found(runs, key(task, optimizer, rate, "K=1", seed)))
    ]
    return min(swept, key=lambda run: run["test_loss"] or math.inf)["rate"]


def key(task: str, optimizer: str, rate: float, method: str, seed: int) -> Run:
    """Returns the values that identify a run."""
    return {
        "task": task,
        "optimizer": optimizer,
        "rate": rate,
        "method": method,
        "seed": seed,
    }


def found(runs: list[Run], wanted: Run) -> Run | None:
    """Returns the run with these values, or `None` if there is none."""
    return next((run for run in runs if wanted.items() <= run.items()), None)


def pairs(runs: list[Run]) -> list[tuple[str, str]]:
    """Returns the pairs of task and optimizer that have been run, ordered by task."""
    tasks, optimizers = (
        list(dict.fromkeys(run[name] for run in runs)) for name in ("task", "optimizer")
    )
    were = {(run["task"], run["optimizer"]) for run in runs}
    return [pair for pair in itertools.product(tasks, optimizers) if pair in were]


def of_seeds(
    result: dict[str, Any], task: str, optimizer: str, rate: float, method: str
) -> list[Run]:
    """Returns the runs that differ only in their seed."""
    wanted = [key(task, optimizer, rate, method, seed) for seed in result["seeds"]]
    return [run for each in wanted if (run := found(result["runs"], each))]
