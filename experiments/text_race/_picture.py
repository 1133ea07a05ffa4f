"""Draws validation loss over seconds, and over bytes."""

import pathlib
from typing import Any

import numpy as np

from experiments import cluster
from experiments.convergence import Run
from pipejax._internal.figures import new_figure

# The ways to train that take part, those that are expected to be quick first.
COLORS = {
    "local steps, int4": "tab:blue",
    "Pipe-SGD, int4 fed back": "tab:cyan",
    "Pipe-SGD, int8 fed back": "tab:green",
    "Pipe-SGD": "tab:olive",
    "D-Sync, int4 fed back": "tab:purple",
    "DDP, PowerSGD, rank 4": "tab:orange",
    "DDP, PowerSGD": "tab:pink",
    "DDP, fp16": "tab:brown",
    "DDP": "tab:red",
    "D-Sync": "tab:gray",
}


def picture(cells: list[Run], path: pathlib.Path) -> None:
    """Draws the mean over seeds of each way to train; writes a PNG file."""
    figure = new_figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [name for name in COLORS if any(x["method"] == name for x in cells)]
    for name in names:
        curves = [cell["curve"] for cell in cells if cell["method"] == name]
        loss = _mean(curves, "loss")
        left.plot(_mean(curves, "seconds"), loss, color=COLORS[name], label=name)
        right.plot(_mean(curves, "megabytes"), loss, color=COLORS[name])
    rate = cluster.shown_rate(cells[0]["rate"])
    counts = {sum(cell["method"] == name for cell in cells) for name in names}
    seeds = " to ".join(map(str, sorted({min(counts), max(counts)})))
    left.set(ylabel="validation loss in nats", xlabel="seconds of training")
    right.set(xlabel="megabytes that a host has sent")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"nanoGPT's model for CPUs, four emulated hosts on 2 cores, {rate} links, "
        + ("one seed" if counts == {1} else f"means of {seeds} seeds"),
        fontsize="medium",
    )
    figure.legend(loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=120)


def _mean(curves: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.mean([curve[name] for curve in curves], axis=0)
