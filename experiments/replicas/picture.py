"""Draws what a delay of one step costs over the number of replicas.

There is a panel for each task, with the change of test loss from synchronous training:
a mean over three seeds, with its standard error.

Command: python -m experiments.replicas.picture
Time: a few seconds.
Result: docs/replicas.png, from experiments/results/replicas_TASK.json
"""

import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import tyro

from pipejax._internal.figures import new_figure

from ._runs import Result
from ._table import SHOWN, committed, shown

STYLES = dict(zip(SHOWN, (("-", "o"), ("--", "s")), strict=True))
COLORS = {"momentum": "C0", "adamw": "C1", "muon": "C2"}
NAMES = dict(zip(SHOWN, ("the default", "rank 16 at once"), strict=True))
WORST = 0.5  # nats, at which runs that lose more or diverge are drawn
MATCHES = 0.01  # nats


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the picture."""

    plot: pathlib.Path = pathlib.Path("docs/replicas.png")
    """The file that the picture is written to."""


def main(config: Config) -> None:
    """Draws the committed results."""
    picture(committed(), config.plot)


def picture(found: Sequence[Result], path: pathlib.Path) -> None:
    """Draws a panel for each task that has runs with three seeds."""
    having = [result for result in found if any(shown(result))]
    figure = new_figure(figsize=(2 + 4.5 * len(having), 3.8), layout="constrained")
    panels = figure.subplots(1, len(having), squeeze=False, sharey=True)[0]
    for axes, result in zip(panels, having, strict=True):
        draw(axes, result)
    panels[0].set_ylabel("test loss above synchronous training, nats")
    panels[0].legend(fontsize="small", loc="upper left")
    figure.savefig(path, dpi=110)


def draw(axes: Any, result: Result) -> None:
    """Draws a line for each optimizer and method."""
    groups = itertools.groupby(shown(result), key=lambda found: found[0])
    for optimizer, group in groups:
        rows = list(group)
        counts = [count for _, count, _ in rows]
        for number, method in enumerate(SHOWN):
            heights = [height(pairs[number]) for _, _, pairs in rows]
            line, marker = STYLES[method]
            axes.errorbar(
                counts,
                [middle for middle, _ in heights],
                [error for _, error in heights],
                color=COLORS[optimizer],
                linestyle=line,
                marker=marker,
                capsize=2,
                label=f"{optimizer}, {NAMES[method]}",
            )
    axes.axhspan(-MATCHES, MATCHES, color="gray", alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=MATCHES)
    axes.set_ylim(-1.2 * MATCHES, 1.5 * WORST)
    axes.set_yticks([0, 0.01, 0.1, WORST], ["0", "0.01", "0.1", "diverged"])
    counts = sorted({count for _, count, _ in shown(result)})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(title=result["task"], xlabel="replicas that share a batch")
    axes.grid(alpha=0.3)


def height(pairs: Sequence[Sequence[Any]]) -> tuple[float, float]:
    """Returns the mean change of test loss and its standard error."""
    ends = [[run["test_loss"] for run in pair] for pair in pairs]
    if any(None in pair for pair in ends):
        return WORST, 0.0
    changes = [later - first for first, later in ends]
    error = statistics.stdev(changes) / len(changes) ** 0.5
    return min(statistics.mean(changes), WORST), error


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
