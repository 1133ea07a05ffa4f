"""Compares step times of Pipe-SGD with those of other methods, on four hosts with TCP.

Bars, all of which are ratios within one run:

- A step of Pipe-SGD takes at most 1.05 times the longer of its own compute and its own
  exchange. With int8 or PowerSGD, it takes at most 1.10 times the longer of the two.
- In every cell of the wide MLP, the best step of pipejax is shorter than the step of
  DDP with its best hook, if each is divided by the compute of its own framework.
- At some rate, the best step of pipejax is at least 5.4 times as fast as that of a
  synchronous parameter server, and 3.2 times as fast as D-Sync.
- Where exchange and compute take the same time, Pipe-SGD without a codec is at least
  1.8 times as fast as D-Sync.

The result file has the ratios, which show which bars are met.

Hosts are network namespaces on this machine (`experiments.cluster`). They share its
cores, part of whose time the network code of the kernel takes. Each step time has its
limit beside it: the longer of the compute of its framework, and of its bytes at the
rate of the link. The table also has the time for which all cores together worked. If
all cores work for the whole step, no schedule makes the step shorter on this machine.

Command: python -m experiments.speedup; with --cells 5 6 7 for some of the cells, while
the others stay as they are
Time: about 100 minutes on 2 cores.
Result: experiments/results/speedup.json, docs/speedup.png
"""

import dataclasses
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import tyro
from rich.table import Table

import pipejax as pj
from pipejax._internal.figures import new_figure

from . import cluster, report
from .methods import Problem

HOSTS = 4
COMPUTE = ("compute", "DDP compute")  # always measured, for the limits


class Cell(NamedTuple):
    """One model on one network.

    Attributes:
      problem: The model, and the batch of each host.
      rate: Rate of the link of each host, in each direction.
      measured: Methods of which compute and exchange are also timed alone.
    """

    problem: Problem
    rate: str
    measured: tuple[str, ...] = ()


METHODS = (
    *("PS-Sync", "PS-Async", "D-Sync", "D-Sync, truncate", "D-Sync, int8"),
    *("Pipe-SGD", "Pipe-SGD, plain", "Pipe-SGD, truncate", "Pipe-SGD, int8"),
    *("Pipe-SGD, int4", "Pipe-SGD, PowerSGD", "DDP", "DDP, fp16", "DDP, PowerSGD"),
)
PIPELINED = ("Pipe-SGD", "Pipe-SGD, int8", "Pipe-SGD, PowerSGD")
WIDE, LARGE = Problem("wide_mlp", 512), Problem("wide_mlp", 2816)
CELLS = (
    Cell(WIDE, "500mbit", PIPELINED),
    Cell(WIDE, "200mbit", PIPELINED),
    Cell(WIDE, "100mbit"),
    Cell(LARGE, "100mbit", PIPELINED),  # exchange and compute take the same time
    Cell(WIDE, "1gbit", PIPELINED),
    Cell(Problem("mlp", 256), "100mbit"),
    Cell(Problem("cnn", 32), "100mbit"),
    Cell(Problem("resnet18", 4), "500mbit"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    rounds: int = 5
    """Number of rounds. In each round, every method takes its turn."""
    steps: int = 1
    """Number of timed steps in a turn."""
    methods: tuple[str, ...] = METHODS
    """Methods to time, by their names in `experiments.methods`."""
    cells: tuple[int, ...] = tuple(range(len(CELLS)))
    """Indices of the cells to measure. The result file keeps its other cells."""
    out: pathlib.Path = report.RESULTS / "speedup.json"
    """File to write the result to, as JSON."""
    plot: pathlib.Path = pathlib.Path("docs/speedup.png")
    """File to write the picture to, as PNG."""


def main(config: Config) -> None:
    """Measures cell by cell, prints tables, and writes the result and the picture."""
    jax.config.update("jax_platforms", "cpu")
    cells = begun(config.out, CELLS)
    for number in config.cells:
        cell = CELLS[number]
        cells[cell] = {**report.origin(), **measured(cell, config)}
        show(cells[cell])
        report.save(config.out, seed=0, hosts=HOSTS, cells=in_order(cells, CELLS))
    picture(in_order(cells, CELLS), config.plot)


def begun(out: pathlib.Path, cells: Sequence[Any]) -> dict[Any, dict[str, Any]]:
    """Returns those of `cells` that an existing result has, for a run to replace."""
    return {
        cell: found
        for found in report.kept(out)
        for cell in cells
        if (dataclasses.asdict(cell.problem), cell.rate)
        == (found["problem"], found["rate"])
    }


def in_order(found: dict[Any, Any], cells: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the figures of all measured cells, in the order of `cells`."""
    return [found[cell] for cell in cells if cell in found]


def measured(cell: Cell, config: Config) -> dict[str, Any]:
    """Starts one cluster, on which all methods take turns, and returns the figures."""
    figures = cluster.ask(
        cluster.Network.of(HOSTS, (cell.rate,)),
        "experiments.side_by_side",
        [
            *cell.problem.flags(),
            *("--rounds", str(config.rounds), "--steps", str(config.steps)),
            *("--methods", *dict.fromkeys((*COMPUTE, *config.methods))),
            *("--measured", *cell.measured),
        ],
    )
    return {
        "problem": dataclasses.asdict(cell.problem),
        "rate": cell.rate,
        **figures,
        "rows": rows(figures["methods"], cluster.bits_per_second(cell.rate) / 8),
    }


def rows(found: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """Returns the medians, the limit and the ratios of each method.

    `faster_than` has the quartiles of the ratios to other methods, over rounds.
    """
    table = {}
    for name, figures in found.items():
        own = "DDP compute" if name.startswith("DDP") else "compute"
        compute = statistics.median(found[own]["seconds"])
        wire = figures["wire_bytes"] / bandwidth
        limit = max(compute, wire)
        step = statistics.median(figures["seconds"])
        table[name] = {
            "step": step,
            "wire": wire,
            "limit": limit,
            "ratio_to_limit": step / limit,
            "ratio_to_compute": step / compute,
            "cores": statistics.median(figures["cores"]),
            "faster_than": {
                other: ratios(found[other]["seconds"], figures["seconds"])
                for other in ("PS-Sync", "PS-Async", "D-Sync", *_ddp(found))
                if other in found
            },
        }
    return table


def table_rows(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns titles, then a row for each model and method."""
    titles = ["model, batch, links", "method", "ms a step", "over its limit"]
    titles += ["over the longer of compute and exchange", "wire, ms", "cores, ms"]
    table = [titles]
    for cell in cells:
        problem = cell["problem"]
        name = f"{problem['model']}, {problem['batch_size']}, {cell['rate']}"
        for method, row in cell["rows"].items():
            measured = cell["measured"].get(method)
            ratio = "" if measured is None else statistics.median(measured["ratio"])
            table.append(
                [
                    name,
                    method,
                    f"{1e3 * row['step']:,.0f}",
                    f"{row['ratio_to_limit']:.2f}",
                    ratio if isinstance(ratio, str) else f"{ratio:.2f}",
                    f"{1e3 * row['wire']:,.0f}",
                    f"{1e3 * row['cores']:,.0f}",
                ]
            )
    if not any(row[4] for row in table[1:]):  # nothing was measured alone
        table = [[*row[:4], *row[5:]] for row in table]
    return table


def ratios(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    """Returns the quartiles over rounds of the ratio `slow / fast`."""
    each = [a / b for a, b in zip(slow, fast, strict=True)]
    return report.quartiles(each)


def _ddp(found: dict[str, Any]) -> list[str]:
    return [n for n in found if n.startswith("DDP") and n != "DDP compute"]


def show(cell: dict[str, Any]) -> None:
    """Prints the table of a cell, and the most that pipelining can gain there."""
    problem, found = cell["problem"], cell["rows"]
    compared = list(found["compute"]["faster_than"])
    table = Table(
        *("", "step, ms", "wire, ms", "cores, ms", "limit, ms"),
        *("step / limit", "step / compute"),
        *(f"over {name}" for name in compared),
        title=f"{problem['model']}, batch {problem['batch_size']}, {cell['rate']}",
    )
    for name, row in found.items():
        table.add_row(
            name,
            *(f"{1e3 * row[key]:.0f}" for key in ("step", "wire", "cores", "limit")),
            *(f"{row[key]:.2f}" for key in ("ratio_to_limit", "ratio_to_compute")),
            *(f"{row['faster_than'][other][1]:.2f}" for other in compared),
        )
    console = report.console(width=150)
    console.print(table)
    if "D-Sync" in found:
        compute, wire = found["compute"]["step"], found["D-Sync"]["wire"]
        exchange = pj.timing.Duration(0, wire, 0, 0, 0)
        most = pj.timing.ceilings(pj.timing.Compute.of(compute), exchange)
        console.print(
            f"Pipelining alone gains at most {most['synchronous']:.2f} over D-Sync,"
            f" {most['overlapped']:.2f} over D-Sync beside the backward pass."
        )
    for name, times in cell["measured"].items():
        low, middle, high = statistics.quantiles(
            times["ratio"], n=4, method="inclusive"
        )
        console.print(
            f"{name}: step / max(compute, exchange) {middle:.2f} ({low:.2f} -"
            f" {high:.2f}), floor 1.00"
        )
    for name, why in cell["missing"].items():
        console.print(f"{name}: {why}")


# The bars of the two parameter servers are several times as long as all others. Their
# times are in the tables.
DRAWN = {
    "D-Sync": "tab:red",
    "DDP": "tab:orange",
    "DDP, fp16": "tab:orange",
    "DDP, PowerSGD": "tab:orange",
    "Pipe-SGD": "tab:blue",
    "Pipe-SGD, int8": "tab:blue",
    "Pipe-SGD, PowerSGD": "tab:blue",
}


def picture(cells: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws the step times of each cell as bars, with lines at the compute times."""
    rows = -(-len(cells) // 4)
    figure = new_figure(figsize=(14, 0.6 + 3 * rows), layout="constrained")
    for number, cell in enumerate(cells, 1):
        axes = figure.add_subplot(rows, min(4, len(cells)), number)
        found, problem = cell["rows"], cell["problem"]
        shown = [name for name in DRAWN if name in found]
        axes.barh(
            shown,
            [1e3 * found[name]["step"] for name in shown],
            color=[DRAWN[name] for name in shown],
        )
        for name, style in (("compute", "-"), ("DDP compute", ":")):
            if name in found:
                step = 1e3 * found[name]["step"]
                axes.axvline(step, color="black", linestyle=style, label=name)
        axes.invert_yaxis()
        size, rate = problem["batch_size"], cluster.shown_rate(cell["rate"])
        axes.set_title(
            f"{problem['model']}, {size} per host, {rate}", fontsize="medium"
        )
        axes.set_xlabel("ms per step")
        if (number - 1) % 4:
            axes.set_yticklabels([])
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
