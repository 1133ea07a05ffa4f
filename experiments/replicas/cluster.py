"""Times steps that exchange a part of each gradient at once, on four emulated hosts.

Claim: a part of rank 4 or 16, which a step exchanges at once, adds little to the time
of a pipelined step, because it has few bytes. On CPUs of several processes nothing
hides it: it waits for the backward pass, and the update waits for it.

Each step has its limit beside it: the longer of the compute, and of its bytes at the
rate of the link. The hosts share the cores of this machine, which work for the time in
the column `cores`.

Command: python -m experiments.replicas.cluster
Time: about 10 minutes on 2 cores.
Result: experiments/results/replicas_cluster.json
"""

import dataclasses
import pathlib

import jax
import tyro

from .. import report, speedup

METHODS = (
    *("compute", "D-Sync", "Pipe-SGD"),
    *("Pipe-SGD, rank 4 at once", "Pipe-SGD, rank 16 at once"),
)
CELLS = (
    speedup.Cell(speedup.WIDE, "500mbit"),
    speedup.Cell(speedup.WIDE, "100mbit"),
    speedup.Cell(speedup.LARGE, "100mbit"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    rounds: int = 5
    """Number of rounds. In each round, every method takes its turn."""
    steps: int = 2
    """Number of timed steps in a turn."""
    cells: tuple[int, ...] = tuple(range(len(CELLS)))
    """Indices of the cells to measure. The result file keeps its other cells."""
    out: pathlib.Path = report.RESULTS / "replicas_cluster.json"
    """File to write the result to, as JSON."""


def main(config: Config) -> None:
    """Measures cell by cell, prints the table, and writes the result."""
    jax.config.update("jax_platforms", "cpu")
    cells = speedup.begun(config.out, CELLS)
    timed = speedup.Config(rounds=config.rounds, steps=config.steps, methods=METHODS)
    for number in config.cells:
        cell = CELLS[number]
        cells[cell] = {**report.origin(), **speedup.measured(cell, timed)}
        done = speedup.in_order(cells, CELLS)
        report.save(config.out, seed=0, hosts=speedup.HOSTS, cells=done)
    table = speedup.table_rows(speedup.in_order(cells, CELLS))
    report.console(width=150).print(report.table("exchanged at once", table))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
