"""Measures local steps after equal time, where an exchange takes as long as n steps.

Claim: an exchange that is always under way (H = V = n) is better than exchanges at once
with the best H, for which time is left.

In the time of S steps, hidden local steps take S steps. If an exchange follows at once
after every H steps, S H / (H + n) steps fit. Every run has the learning rate that is
best for S synchronous steps, and its schedule ends with the run. Codecs are left out:
with one, n is that of the coded exchange.

Command: python -m experiments.local_steps.equal_time --text tinyshakespeare.txt
         It takes what it can from the result of `experiments.local_steps.accuracy`. If
         it is interrupted, start it again: it keeps the runs that have ended.
Time: about 60 seconds a run on 2 cores, and an hour for all 60.
Result: experiments/results/local_steps_equal_time.json
"""

import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Iterator

import tyro

from experiments import report
from experiments.convergence import Run, differences, diverged, spread

from . import _learn
from ._learn import Method, known_as, local, of_seeds, run_all
from ._tasks import rate_of

# For each n, the numbers of steps H between exchanges at once, one of which is best.
LENGTHS = {1: (2, 4, 8), 4: (8, 16, 32), 16: (16, 32, 64)}


@dataclasses.dataclass(frozen=True)
class Config(_learn.Config):
    """Settings of the runs."""

    out: pathlib.Path = report.RESULTS / "local_steps_equal_time.json"
    """The file of the result. Runs that it already holds are not repeated."""


def main(config: Config) -> list[Run]:
    """Runs what no result holds yet, and prints the table."""
    wanted = runs(config, report.result("convergence")["runs"])
    known = report.kept(report.RESULTS / "local_steps_accuracy.json")
    cells = run_all(config, wanted, config.out, known)
    shown = rows([*cells, *known], config.steps)
    report.console(width=160).print(report.table("loss after equal time", shown))
    return cells


def committed() -> list[list[str]]:
    """Returns the rows of the committed results."""
    names = "local_steps_equal_time", "local_steps_accuracy"
    cells = [cell for name in names for cell in report.result(name)["cells"]]
    return rows(cells, Config.steps)


def contenders(exchange: int, steps: int) -> list[tuple[int, Method]]:
    """Returns methods with their numbers of steps; the first hides the exchange.

    Args:
      exchange: The steps n that take as long as an exchange.
      steps: The number of steps that take as long as a run.
    """
    at_once = [
        (round(steps * every / (every + exchange)), local(every, 0))
        for every in LENGTHS[exchange]
    ]
    return [(steps, local(exchange, exchange)), *at_once]


def runs(config: Config, tuning: list[Run]) -> Iterator[Run]:
    """Yields what identifies each run, seed by seed."""
    for seed, task, name, exchange in itertools.product(
        config.seeds, config.tasks, config.optimizers, LENGTHS
    ):
        rate = rate_of(task, name, tuning)
        for steps, method in contenders(exchange, config.steps):
            known = known_as(task, name, steps, method)
            yield known | {"rate": rate, "seed": seed}


def rows(cells: list[Run], steps: int) -> list[list[str]]:
    """Returns titles, then a row for each task, optimizer and length of an exchange.

    The last cell is the change of test loss by hiding the exchange: the mean over
    seeds, with its standard error. Rows are left out until all seeds have been run.
    """
    seeds = {cell["seed"] for cell in cells}
    titles = ["task", "optimizer", "exchange, in steps", "hidden, every step"]
    table = [[*titles, "at once, best H", "H", "change by hiding"]]
    names = dict.fromkeys((x["task"], x["optimizer"]) for x in cells)
    for (task, optimizer), exchange in itertools.product(names, LENGTHS):
        hidden, *at_once = (
            of_seeds(cells, known_as(task, optimizer, count, method))
            for count, method in contenders(exchange, steps)
        )
        whole = all({run["seed"] for run in x} == seeds for x in (hidden, *at_once))
        ended = [runs for runs in at_once if whole and not diverged(runs)]
        if not ended:
            continue
        best = min(ended, key=_loss)
        changes = spread(differences(hidden, best, "test_loss"), 3)
        losses = f"{_loss(hidden):.3f}", f"{_loss(best):.3f}"
        every = str(best[0]["sync_every"])
        table.append([task, optimizer, str(exchange), *losses, every, changes])
    return table


def _loss(runs: list[Run]) -> float:
    return statistics.mean(run["test_loss"] for run in runs)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
