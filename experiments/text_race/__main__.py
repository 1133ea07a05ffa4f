"""Races ways to train nanoGPT's model for CPUs on four hosts with slow links.

Question: how does the validation loss fall over seconds, and over bytes sent, on links
of 100 Mbit/s, where an exchange of all gradients takes far longer than the compute of a
step?

All ways train on the same batches from the same parameters, with the learning rate that
nanoGPT documents for synchronous training. The hosts share the cores of this machine.
DDP is PyTorch's, with the same model, alone and with its hooks. Local steps choose
their length by themselves, and hide each exchange.

Command: python -m experiments.text_race --text tinyshakespeare.txt
         If it is interrupted, start it again: it keeps the runs that have ended.
Time: about an hour on 2 cores for each seed.
Result: experiments/results/text_race.json, docs/text_race.png
"""

import dataclasses
import itertools
import math
import pathlib
import statistics
from typing import Any

import jax
import tyro

from experiments import cluster, report
from experiments.convergence import Run, found, spread
from experiments.methods import TextProblem

from ._picture import COLORS, picture

HOSTS = 4
NEAR = 0.05  # nats above the lowest loss


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the race."""

    text: pathlib.Path = pathlib.Path("tinyshakespeare.txt")
    """The text. Its last tenth is for validation."""
    rate: str = "100mbit"
    """The rate of the link of each host."""
    methods: tuple[str, ...] = tuple(COLORS)
    """The ways to train, by their names in `experiments.methods`."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the parameters and of the batches."""
    steps: int = 2000
    """The number of steps of a run."""
    out: pathlib.Path = report.RESULTS / "text_race.json"
    """The file of the result. Runs that it already holds are not repeated."""
    plot: pathlib.Path = pathlib.Path("docs/text_race.png")
    """The file that the picture is written to."""


def main(config: Config) -> list[Run]:
    """Runs what the result does not hold yet, prints the table, and draws."""
    jax.config.update("jax_platforms", "cpu")
    cells, kind = report.kept(config.out), {"rate": config.rate, "steps": config.steps}
    for seed, method in itertools.product(config.seeds, config.methods):
        run = {"method": method, **kind, "seed": seed}
        if found(cells, run) is not None:
            continue
        figures = on_hosts(config, method, seed)
        cells.append({**run, **report.origin(), "curve": figures})
        print(method, seed, figures["loss"][-1], figures["seconds"][-1], flush=True)
        report.save(config.out, seed=seed, hosts=HOSTS, cells=cells)
    shown = [cell for cell in cells if kind.items() <= cell.items()]
    report.console(width=120).print(report.table("text race", rows(shown)))
    picture(shown, config.plot)
    return cells


def on_hosts(config: Config, method: str, seed: int) -> Any:
    """Runs a way to train on the cluster."""
    problem = TextProblem(config.text.resolve(), steps=config.steps, seed=seed)
    network = cluster.Network.of(HOSTS, (config.rate,))
    flags = ["--method", method, *problem.flags()]
    return cluster.ask(network, "experiments.text_race._member", flags)


def rows(cells: list[Run]) -> list[list[str]]:
    """Returns titles, then a row for each way to train, the quickest first.

    Figures are those at the end of a run, as means over seeds, with the standard error
    of the loss. A column has the seconds until a test finds a loss at most `NEAR` above
    the lowest of all ways, or a dash if not all seeds reach it.
    """
    names = dict.fromkeys(cell["method"] for cell in cells)
    runs = {name: [x["curve"] for x in cells if x["method"] == name] for name in names}
    ends = (statistics.mean(run["loss"][-1] for run in x) for x in runs.values())
    near = math.ceil(100 * (min(ends) + NEAR)) / 100
    titles = ["method", "validation loss", "seconds", "MB sent by a host"]
    table = [[*titles, f"seconds to {near:.2f}", "seeds"]]
    for name in sorted(names, key=lambda name: _mean(runs[name], "seconds")):
        table.append(
            [
                name,
                ended([run["loss"][-1] for run in runs[name]]),
                f"{_mean(runs[name], 'seconds'):.0f}",
                f"{_mean(runs[name], 'megabytes'):.0f}",
                reached([until(run, near) for run in runs[name]]),
                str(len(runs[name])),
            ]
        )
    return table


def until(run: dict[str, Any], loss: float) -> float:
    """Returns the seconds until the first test that finds at most this loss."""
    tests = zip(run["seconds"], run["loss"], strict=True)
    return next((seconds for seconds, found in tests if found <= loss), math.inf)


def reached(times: list[float]) -> str:
    """Returns the mean of the seconds, or a dash if one of them is infinite."""
    mean = statistics.mean(times)
    return f"{mean:.0f}" if math.isfinite(mean) else "-"


def ended(losses: list[float]) -> str:
    """Returns `1.234 ± 0.005`, the mean and its standard error, if there is one."""
    return spread(losses, 3).removeprefix("+")


def _mean(runs: list[dict[str, Any]], name: str) -> float:
    """Returns the mean over seeds of the last value of a curve."""
    return statistics.mean(run[name][-1] for run in runs)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
