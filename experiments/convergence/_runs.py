"""Runs: what tells one from another, and how to find it among others."""

import itertools
import math
from typing import Any

from ._contenders import OPTIMIZERS

Run = dict[str, Any]
Setting = tuple[str, str, float]  # task, optimizer, rate


def tuned_rate(task: str, optimizer: str, seed: int, runs: list[Run]) -> float:
    """The rate of the least synchronous test loss."""
    swept = [
        run
        for rate in OPTIMIZERS[optimizer].rates
        if (run := found(runs, key(task, optimizer, rate, "K=1", seed)))
    ]
    return min(swept, key=lambda run: run["test_loss"] or math.inf)["rate"]


def key(task: str, optimizer: str, rate: float, method: str, seed: int) -> Run:
    """What tells a run from others."""
    return {
        "task": task,
        "optimizer": optimizer,
        "rate": rate,
        "method": method,
        "seed": seed,
    }


def found(runs: list[Run], wanted: Run) -> Run | None:
    """The run that is wanted, if it has been."""
    return next((run for run in runs if wanted.items() <= run.items()), None)


def pairs(runs: list[Run]) -> list[tuple[str, str]]:
    """Tasks and optimizers that were run, optimizers by task."""
    tasks, optimizers = (
        list(dict.fromkeys(run[name] for run in runs)) for name in ("task", "optimizer")
    )
    were = {(run["task"], run["optimizer"]) for run in runs}
    return [pair for pair in itertools.product(tasks, optimizers) if pair in were]


def of_seeds(
    result: dict[str, Any], task: str, optimizer: str, rate: float, method: str
) -> list[Run]:
    """The runs that differ in their seed alone."""
    wanted = [key(task, optimizer, rate, method, seed) for seed in result["seeds"]]
    return [run for each in wanted if (run := found(result["runs"], each))]
