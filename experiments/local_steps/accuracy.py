"""Measures what local steps cost in accuracy, over the length of a round.

Question: how much worse is training in which four groups exchange parameters once in H
steps, how much of that comes from hiding the exchange, and how much from a codec?

The tasks are those of `experiments.learning`, at the learning rates that are best for
synchronous training (`experiments.convergence`), and nanoGPT's configuration for CPUs
as it is documented. Each of four groups takes a quarter of the batch. All runs have the
same number of steps, and end with a drain.

Command: python -m experiments.local_steps.accuracy --text tinyshakespeare.txt
         With --tasks mnist cifar10 --optimizers adamw for images, and with --tasks
         nanogpt --optimizers adamw --steps 2000 for nanoGPT's. If it is interrupted,
         start it again: it keeps the runs that have ended.
Time: about 80 seconds a run on 2 cores, also on CIFAR-10, and two and a half hours for
all 108; about 30 seconds a run on MNIST, and 150 on nanoGPT's configuration.
Result: experiments/results/local_steps_accuracy.json
"""

import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Iterator

import tyro

from experiments import report
from experiments.convergence import Run

from . import _learn
from ._learn import SYNCHRONOUS, Method, change, known_as, local, of_seeds, run_all
from ._tasks import rate_of


@dataclasses.dataclass(frozen=True)
class Config(_learn.Config):
    """Settings of the runs."""

    sync_every: tuple[int, ...] = (4, 16, 64)
    """The numbers of steps of a round."""
    out: pathlib.Path = report.RESULTS / "local_steps_accuracy.json"
    """The file of the result. Runs that it already holds are not repeated."""


def main(config: Config) -> list[Run]:
    """Runs what the result does not hold yet, and prints the table."""
    wanted = runs(config, report.result("convergence")["runs"])
    cells = run_all(config, wanted, config.out, [])
    report.console(width=160).print(report.table("loss above synchronous", rows(cells)))
    return cells


def columns(every: int) -> dict[str, Method]:
    """Returns the methods with rounds of `every` steps, by their titles."""
    return {
        "at once": local(every, 0),
        "V = H": local(every, every),
        "V = H, int8": local(every, every, "int8"),
        "V = H, int4": local(every, every, "int4"),
        "V = 1": local(every, 1),
        "V = H/4": local(every, max(1, every // 4)),
    }


def runs(config: Config, tuning: list[Run]) -> Iterator[Run]:
    """Yields what identifies each run, column by column."""
    found = [columns(every) for every in config.sync_every]
    methods = [[SYNCHRONOUS], *([x[title] for x in found] for title in found[0])]
    for column in methods:
        for seed, task, name, method in itertools.product(
            config.seeds, config.tasks, config.optimizers, column
        ):
            rate = rate_of(task, name, tuning)
            known = known_as(task, name, config.steps, method)
            yield known | {"rate": rate, "seed": seed}


def rows(cells: list[Run]) -> list[list[str]]:
    """Returns titles, then a row for each task, optimizer and length of a round.

    A cell is the change of test loss from synchronous training: the mean over seeds,
    with its standard error. It is empty until all seeds have been run. Rows and columns
    without any cell are left out.
    """
    lengths = sorted({x["sync_every"] for x in cells if x["method"] == "local"})
    table = [["task", "optimizer", "test loss, synchronous", "H", *columns(1)]]
    names = dict.fromkeys((x["task"], x["optimizer"], x["steps"]) for x in cells)
    for (task, optimizer, steps), every in itertools.product(names, lengths):
        base, *ended = (
            of_seeds(cells, known_as(task, optimizer, steps, method))
            for method in (SYNCHRONOUS, *columns(every).values())
        )
        mean = f"{statistics.mean(run['test_loss'] for run in base):.3f}"
        changes = [change(runs, base) for runs in ended]
        if any(changes):
            table.append([task, optimizer, mean, str(every), *changes])
    there = [any(column) for column in zip(*table[1:], strict=True)]
    return [list(itertools.compress(row, there)) for row in table]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
