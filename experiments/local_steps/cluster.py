"""Times local steps on four emulated hosts with slow links, beside a pipeline.

Claim: where the exchange of a round fits twice into the compute of its steps, hosts
compute for at least 0.95 of the time.

The compute utilisation of a method is the time of a step that exchanges nothing,
divided by the time of its steps. A link carries `2 (p-1)/p` copies of the parameters in
a round. The hosts share the cores of this machine.

Command: python -m experiments.local_steps.cluster
Time: from 3 minutes a cell on 2 cores, with short rounds and quick links, to 20.
Result: experiments/results/local_steps_cluster.json
"""

import dataclasses
import itertools
import pathlib
import statistics
from typing import Any

import jax
import tyro

from experiments import cluster, report
from experiments.methods import Problem

HOSTS = 4
PROBLEM = Problem("wide_mlp", 256)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    rates: tuple[str, ...] = ("50mbit", "200mbit", "1gbit")
    """The rates of the link of each host."""
    sync_every: tuple[int, ...] = (8, 32, 128)
    """The numbers of steps of a round."""
    rounds: int = 3
    """Number of rounds. In each round, every method takes its turn."""
    out: pathlib.Path = report.RESULTS / "local_steps_cluster.json"
    """The file of the result. Cells that it already holds are not repeated."""


def main(config: Config) -> None:
    """Measures cell by cell, prints the table, and writes the result."""
    jax.config.update("jax_platforms", "cpu")
    cells = report.kept(config.out)
    known = {(cell["rate"], cell["sync_every"]) for cell in cells}
    for rate, every in itertools.product(config.rates, config.sync_every):
        if (rate, every) in known:
            continue
        found = cluster.ask(
            cluster.Network.of(HOSTS, (rate,)),
            "experiments.local_steps._member",
            [
                *PROBLEM.flags(),
                *("--sync-every", str(every), "--rounds", str(config.rounds)),
            ],
        )
        cell = {"rate": rate, "sync_every": every, **found}
        cells.append({**report.origin(), **cell, **times(cell)})
        cells.sort(key=place)
        report.save(config.out, seed=0, hosts=HOSTS, cells=cells)
    report.console(width=150).print(report.table("compute utilisation", rows(cells)))


def place(cell: dict[str, Any]) -> tuple[float, int]:
    """Returns the place of a cell in the table."""
    return cluster.bits_per_second(cell["rate"]), cell["sync_every"]


def times(cell: dict[str, Any]) -> dict[str, float]:
    """Returns the seconds of the compute and of the exchange of a round."""
    step = statistics.median(cell["seconds"]["compute"])
    sent = 2 * (HOSTS - 1) / HOSTS * 4 * cell["elements"]
    exchange = sent / (cluster.bits_per_second(cell["rate"]) / 8)
    return {"compute": step * cell["sync_every"], "exchange": exchange}


def rows(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns titles, then a row for each rate and number of steps of a round.

    A cell is the compute utilisation of a method: the median over rounds, with the
    least and the greatest.
    """
    names = [name for name in cells[0]["seconds"] if name != "compute"]
    table = [["links", "H", "exchange, in steps", *names]]
    for cell in cells:
        steps = cell["exchange"] / cell["compute"] * cell["sync_every"]
        shares = (share(cell["seconds"]["compute"], cell["seconds"][n]) for n in names)
        table.append([cell["rate"], str(cell["sync_every"]), f"{steps:.1f}", *shares])
    return table


def share(compute: list[float], steps: list[float]) -> str:
    """Returns a compute utilisation as text, with its range over rounds."""
    shares = [a / b for a, b in zip(compute, steps, strict=True)]
    middle = statistics.median(shares)
    return f"{middle:.2f} ({min(shares):.2f} - {max(shares):.2f})"


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
