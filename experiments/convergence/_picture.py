"""Draws the runs."""

import math
import pathlib
from typing import Any

from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from pipejax._internal.figures import new_figure

from ._runs import Run, of_seeds, pairs, tuned_rate

# Later lines are drawn over earlier ones, so that synchronous training is on top.
DRAWN = {
    "K=2, plain": "C1",
    "K=2, robust": "C4",
    "K=2, predicted": "C2",
    "K=1": "black",
}


def picture(result: dict[str, Any], path: pathlib.Path) -> None:
    """Draws the training loss in the course of the runs at the tuned rates.

    There is a row for each task and a column for each optimizer. The axis of a row ends
    at 1.5 times the loss with which synchronous training begins. A run above this has
    diverged, and would leave no room for the others.
    """
    of_all = pairs(result["runs"])
    tasks = list(dict.fromkeys(task for task, _ in of_all))
    optimizers = list(dict.fromkeys(optimizer for _, optimizer in of_all))
    figure = new_figure(
        figsize=(4 * len(optimizers), 3 * len(tasks)), layout="constrained"
    )
    panels = figure.subplots(
        len(tasks), len(optimizers), squeeze=False, sharex=True, sharey="row"
    )
    for row, task in zip(panels, tasks, strict=True):
        drawn: list[Run] = []
        for axes, optimizer in zip(row, optimizers, strict=True):
            if (task, optimizer) in of_all:
                drawn += draw(axes, result, task, optimizer)
        scale(row[0], drawn)
    for axes in panels[-1]:
        axes.set_xlabel("share of the run")
    lines, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(
        lines[::-1], names[::-1], loc="outside upper center", ncols=len(DRAWN)
    )
    figure.savefig(path, dpi=110)


def draw(axes: Any, result: dict[str, Any], task: str, optimizer: str) -> list[Run]:
    """Draws a line for every method and seed, and returns the runs that are drawn."""
    rate = tuned_rate(task, optimizer, result["seeds"][0], result["runs"])
    drawn = []
    for method, color in DRAWN.items():
        for number, run in enumerate(of_seeds(result, task, optimizer, rate, method)):
            losses = [math.nan if x is None else x for x in run["losses"]]
            shares = [(part + 0.5) / len(losses) for part in range(len(losses))]
            label = None if number else method
            axes.plot(shares, losses, color=color, linewidth=1, label=label)
            drawn.append(run)
    axes.set_title(f"{task}, {optimizer} at {rate:g}")
    axes.grid(alpha=0.3)
    return drawn


def scale(axes: Any, drawn: list[Run]) -> None:
    """Scales the axis of losses, which all panels of a row share."""
    least = min(x for run in drawn for x in run["losses"] if x is not None)
    first = max(run["losses"][0] for run in drawn if run["method"] == "K=1")
    axes.set(
        ylabel="training loss, nats", yscale="log", ylim=(0.8 * least, 1.5 * first)
    )
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
