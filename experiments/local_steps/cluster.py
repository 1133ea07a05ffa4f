"""Times local steps on four emulated hosts with slow links, beside a pipeline.

Claim: where the exchange of a round fits twice into the compute of its steps, hosts
compute for at least 0.95 of the time.

The compute utilisation of a method is the time of a step that exchanges nothing,
divided by the time of its steps. PyTorch's DDP is compared with its own compute. A link
carries `2 (p-1)/p` copies of the parameters in a round. The hosts share the cores of
this machine.

Command: python -m experiments.local_steps.cluster
Time: from 3 minutes a cell on 2 cores, with short rounds and quick links, to 20, and a
minute for DDP on each link.
Result: experiments/results/local_steps_cluster.json
"""

import dataclasses
import itertools
import pathlib
import statistics
import sys
from typing import Any

import jax
import tyro

from experiments import cluster, report
from experiments.methods import Problem

HOSTS = 4
PROBLEM = Problem("wide_mlp", 256)
COMPUTE = "DDP compute"
DDP = ("DDP", "DDP, PowerSGD")


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
    cells, others = report.kept(config.out), report.kept(config.out, "others")

    def save() -> None:
        report.save(config.out, seed=0, hosts=HOSTS, cells=cells, others=others)

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
        save()
    for rate in config.rates:
        if rate not in {cell["rate"] for cell in others}:
            others.append({**report.origin(), "rate": rate, **ddp(rate, config.rounds)})
            save()
    table = report.table("compute utilisation", rows(cells, others))
    report.console(width=180).print(table)


def ddp(rate: str, rounds: int) -> dict[str, Any]:
    """Returns the seconds of a step of DDP, which has no rounds, on links of a rate.

    Raises:
      SystemExit: If PyTorch is not installed.
    """
    found = cluster.ask(
        cluster.Network.of(HOSTS, (rate,)),
        "experiments.side_by_side",
        [
            *PROBLEM.flags(),
            *("--rounds", str(rounds), "--methods", COMPUTE, *DDP, "--measured"),
        ],
    )
    if found["missing"]:
        sys.exit(found["missing"][COMPUTE])
    return {"seconds": {name: x["seconds"] for name, x in found["methods"].items()}}


def place(cell: dict[str, Any]) -> tuple[float, int]:
    """Returns the place of a cell in the table."""
    return cluster.bits_per_second(cell["rate"]), cell["sync_every"]


def times(cell: dict[str, Any]) -> dict[str, float]:
    """Returns the seconds of the compute and of the exchange of a round."""
    step = statistics.median(cell["seconds"]["compute"])
    sent = 2 * (HOSTS - 1) / HOSTS * 4 * cell["elements"]
    exchange = sent / (cluster.bits_per_second(cell["rate"]) / 8)
    return {"compute": step * cell["sync_every"], "exchange": exchange}


def rows(cells: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[list[str]]:
    """Returns titles, then a row for each rate and number of steps of a round.

    A cell is the compute utilisation of a method: the median over rounds, with the
    least and the greatest. That of DDP is the same for all rounds of a rate.
    """
    of_rate = {cell["rate"]: shares(cell["seconds"], COMPUTE) for cell in others}
    table = []
    for cell in cells:
        steps = cell["exchange"] / cell["compute"] * cell["sync_every"]
        found = of_rate.get(cell["rate"], {}) | shares(cell["seconds"], "compute")
        first = {
            "links": cell["rate"],
            "H": str(cell["sync_every"]),
            "exchange, in steps": f"{steps:.1f}",
        }
        table.append(first | found)
    return [[*table[0]], *([*row.values()] for row in table)]


def shares(seconds: dict[str, list[float]], compute: str) -> dict[str, str]:
    """Returns the compute utilisation of each method, as text."""
    return {
        name: share(seconds[compute], steps)
        for name, steps in seconds.items()
        if name != compute
    }


def share(compute: list[float], steps: list[float]) -> str:
    """Returns a compute utilisation as text, with its range over rounds."""
    shares = [a / b for a, b in zip(compute, steps, strict=True)]
    middle = statistics.median(shares)
    return f"{middle:.2f} ({min(shares):.2f} - {max(shares):.2f})"


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
