"""Runs as a table and as a picture."""

import itertools
import math
import pathlib
import statistics
from typing import Any

from pipejax.picture import new_figure

from ._contenders import METHODS
from ._runs import Run, of_seeds, pairs, tuned_rate

DRAWN = ("K=1", "K=2", "K=2, own gradients", "K=3, own gradients", "K=2, robust")


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Titles, then a task, optimizer, factor and method a row, means over seeds."""
    table = [["task", "optimizer", "rate", "method", "loss", "accuracy", "seeds"]]
    runs, seeds = result["runs"], result["seeds"]
    for task, optimizer in pairs(runs):
        tuned = tuned_rate(task, optimizer, seeds[0], runs)
        for factor, method in itertools.product(result["factors"], METHODS):
            if ends := of_seeds(result, task, optimizer, factor * tuned, method):
                rate = f"{factor * tuned:g}"
                cells = [
                    mean_and_range(ends, name)
                    for name in ("test_loss", "test_accuracy")
                ]
                table.append([task, optimizer, rate, method, *cells, str(len(ends))])
    return table


def mean_and_range(runs: list[Run], name: str) -> str:
    """Of the seeds: `0.064 (0.062-0.067)`; or that it diverged."""
    values = [run[name] for run in runs]
    if None in values:
        return "diverged"
    mean, least, most = (of(values) for of in (statistics.mean, min, max))
    return f"{mean:.4f} ({least:.4f}-{most:.4f})"


def picture(result: dict[str, Any], path: pathlib.Path) -> None:
    """Training loss on the way at the tuned rate, a panel a task and optimizer."""
    of_all = pairs(result["runs"])
    tasks = list(dict.fromkeys(task for task, _ in of_all))
    optimizers = list(dict.fromkeys(optimizer for _, optimizer in of_all))
    size = (4 * len(optimizers), 3 * len(tasks))
    figure = new_figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(tasks), len(optimizers), squeeze=False)
    for task, optimizer in of_all:
        axes = panels[tasks.index(task), optimizers.index(optimizer)]
        rate = tuned_rate(task, optimizer, result["seeds"][0], result["runs"])
        for place, method in enumerate(DRAWN):
            for number, run in enumerate(
                of_seeds(result, task, optimizer, rate, method)
            ):
                losses = [math.nan if x is None else x for x in run["losses"]]
                label = None if number else method
                axes.plot(losses, color=f"C{place}", linewidth=1, label=label)
        axes.set(title=f"{task}, {optimizer}, {rate:g}", yscale="log")
        axes.grid(alpha=0.3, which="both")
    for axes in panels[:, 0]:
        axes.set_ylabel("training loss")
    for axes in panels[-1]:
        axes.set_xlabel("of 25 parts of the run")
    panels[0, 0].legend(fontsize="x-small")
    figure.savefig(path, dpi=110)
