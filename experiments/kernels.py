"""Counts the kernels of a step on a GPU, relative to a step written by hand.

Bar: a step of pipejax starts at most three kernels more than a step by hand that skips
nothing. The limit is the step by hand. The bar is missed: a kernel for each array finds
out whether its gradient is finite, and its norm, and about ten make counters and infos.
The result also counts a step by hand that skips updates by gradients that are not
finite, as pipejax does, in a `lax.cond`.

The programs are those of `experiments.memory`, with everything donated. They are
compiled for GPUs that need not be there, and do not run. A collective is counted apart
from other kernels.

Command: python -m experiments.kernels
Time: about 10 minutes on 2 cores.
Result: experiments/results/kernels.json
"""

import dataclasses
import functools
import itertools
import pathlib
import sys
from typing import Any

import tyro
from jax.sharding import Mesh

import pipejax as pj
from pipejax.overlap import Report, inspect, topology

from . import memory, report


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the programs to compile."""

    targets: tuple[str, ...] = ("h100:1x1x1", "h100:1x1x8")
    """Devices to compile for, as `pj.overlap.topology` takes them."""
    models: tuple[memory.Model, ...] = ("mlp", "residual mlp", "cnn", "transformer")
    """Models to compile, of those of `experiments.memory`."""
    out: pathlib.Path = report.RESULTS / "kernels.json"
    """File to write the result to, as JSON."""


BAR = 3


def main(config: Config) -> int:
    """Compiles every step, prints a line for each, and writes the result file.

    Returns:
      The exit code, which is 1 if a step misses its bar.
    """
    cells = []
    for target in config.targets:
        mesh = pj.data_mesh(devices=topology(target))
        for model, step in itertools.product(config.models, memory.BY_HAND):
            cells.append({"target": target, **counted(model, step, mesh)})
            print(cells[-1], flush=True)
    report.save(config.out, seed=0, bar=BAR, cells=cells)
    return int(any(more(cell) > BAR for cell in cells))


def counted(model: memory.Model, step: str, mesh: Mesh) -> dict[str, Any]:
    """Compiles a step of pipejax and those by hand, and counts what they start."""
    problem = memory.problem_of(model, mesh.size)
    train = memory.step_of(step, problem, mesh)
    state = train.abstract_state(problem.params)
    by_hand = functools.partial(
        memory.report_by_hand, step, problem, mesh, train.compiler_options
    )
    found = {
        "pipejax": inspect(train, state, problem.batch),
        "by hand": by_hand(),
        "by hand, checked": by_hand(checks=True),
    }
    counts_by_name = {name: counts(x) for name, x in found.items() if x is not None}
    return {"model": model, "step": step, **counts_by_name}


def counts(found: Report) -> dict[str, int]:
    """Returns the number of kernels and of collectives that one device starts."""
    collectives = sum(each.times for each in found.collectives)
    return {"kernels": found.operations, "collectives": collectives}


def more(cell: dict[str, Any]) -> int:
    """Returns how many more kernels and collectives there are than by hand."""
    return sum(cell["pipejax"].values()) - sum(cell["by hand"].values())


def rows(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns titles, then the kernels of each step, and in brackets those by hand."""
    table = [["GPUs", "model", *dict.fromkeys(cell["step"] for cell in cells)]]
    found: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        ours, hand, checked = (
            sum(cell[name].values())
            for name in ("pipejax", "by hand", "by hand, checked")
        )
        gpus = cell["target"].rpartition("x")[-1]
        row = found.setdefault((gpus, cell["model"]), [])
        row.append(f"{ours} ({hand}, {checked})")
    return [*table, *([*key, *row] for key, row in found.items())]


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
