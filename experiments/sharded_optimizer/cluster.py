"""Times steps with a sharded optimizer on four emulated hosts, beside PyTorch.

Claim: a pipelined step with a sharded optimizer takes at most 1.10 times the longer of
its compute and its exchange, and each host's update a quarter of the time.

ZeRO-1 without a delay, and PyTorch's DDP with its `ZeroRedundancyOptimizer`, run beside
it. Each step has its limit beside it: the longer of the compute of its framework, and
of its bytes at the rate of the link. The hosts share the cores of this machine, which
work for the time in the column `cores`.

Command: python -m experiments.sharded_optimizer.cluster
Time: about 10 minutes on 2 cores.
Result: experiments/results/sharded_optimizer_cluster.json
"""

import dataclasses
import pathlib
import time
from typing import Any

import jax
import optax
import tyro

from .. import report, speedup
from ..methods import Problem

HOSTS = 4
METHODS = (
    *("compute", "D-Sync", "ZeRO-1", "Pipe-SGD", "Pipe-SGD, ZeRO-1"),
    *("DDP compute", "DDP", "DDP, ZeRO-1"),
)
MEASURED = ("Pipe-SGD", "Pipe-SGD, ZeRO-1")
CELLS = (
    speedup.Cell(Problem("wide_mlp", 512), "500mbit", MEASURED),
    speedup.Cell(Problem("resnet18", 4), "500mbit", MEASURED),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    rounds: int = 5
    """Number of rounds. In each round, every method takes its turn."""
    steps: int = 2
    """Number of timed steps in a turn."""
    methods: tuple[str, ...] = METHODS
    """Methods to time, by their names in `experiments.methods`."""
    cells: tuple[int, ...] = tuple(range(len(CELLS)))
    """Indices of the cells to measure. The result file keeps its other cells."""
    out: pathlib.Path = report.RESULTS / "sharded_optimizer_cluster.json"
    """File to write the result to, as JSON."""


def main(config: Config) -> None:
    """Measures cell by cell, prints the table, and writes the result."""
    jax.config.update("jax_platforms", "cpu")
    cells = speedup.begun(config.out, CELLS)
    timed = speedup.Config(
        rounds=config.rounds, steps=config.steps, methods=config.methods
    )
    for number in config.cells:
        cell = CELLS[number]
        updates = update_times(cell.problem, config.rounds)
        figures = speedup.measured(cell, timed)
        cells[cell] = {**report.origin(), **figures, "updates": updates}
        done = speedup.in_order(cells, CELLS)
        report.save(config.out, seed=0, hosts=HOSTS, cells=done)
    table = speedup.table_rows(speedup.in_order(cells, CELLS))
    report.console(width=150).print(report.table("sharded optimizer", table))


def update_times(problem: Problem, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of AdamW's update, of whole parameters and of a quarter.

    A quarter has a fourth of the first axis of a parameter that divides.
    """
    tx = optax.adamw(1e-3)

    def quarter(x: Any) -> Any:
        for axis, length in enumerate(x.shape):
            if length % HOSTS == 0:
                return jax.lax.slice_in_dim(x, 0, length // HOSTS, axis=axis)
        return x

    @jax.jit
    def update(gradients: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    found: dict[str, list[float]] = {"whole": [], "quarter": []}
    start = jax.tree.map(jax.numpy.asarray, problem.start)
    given = {"whole": start, "quarter": jax.tree.map(quarter, start)}
    states = {name: tx.init(params) for name, params in given.items()}
    for name, params in given.items():
        jax.block_until_ready(update(params, states[name], params))
    for _ in range(rounds):
        for name, params in given.items():
            begin = time.perf_counter()
            jax.block_until_ready(update(params, states[name], params))
            found[name].append(time.perf_counter() - begin)
    return found


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
