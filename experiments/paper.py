"""Times the benchmarks of the Pipe-SGD paper, and takes each step apart.

The paper trains an MLP on MNIST, a convex model on CIFAR-100, and AlexNet and ResNet-18
on ImageNet, on four hosts. A CNN for CIFAR-10 is added. Each model trains by a
parameter server (synchronous and asynchronous), by D-Sync and by Pipe-SGD. The latter
two also run with the codecs of the paper: truncation to 16 bits and quantization to 8.

Each step time has its parts beside it, which are measured alone: the compute of a step
without communication, the work of the codec (encoding, adding and decoding), and the
rest of the exchange. A synchronous step takes the sum of the three. A pipelined step
takes the longer of the compute and the other two together, if the cores have the time.
The column `explained` has the step time divided by this estimate. The column `wire` has
the time that the bytes take in the busier direction of the busiest link. A parameter
server takes twice that time, because it sends after it has received.

Hosts are network namespaces on this machine (`experiments.cluster`), whose cores they
share. The rates of the links are chosen so that exchange and compute take times of the
same order, as on a cluster of GPUs with faster links. Images are random, unless
`--data-dir` names a folder in which TFDS has prepared the data sets.

All methods of a model take turns within one run. The methods of AlexNet and ResNet-18
do not fit into memory together. Each of these runs beside its own compute, on a cluster
of its own.

Command: python -m experiments.paper; with --cells 4 for one of the models, while the
others stay as they are
Time: about 90 minutes on 2 cores, of which AlexNet takes 45 and ResNet-18 takes 20.
Result: experiments/results/paper.json, docs/paper.png
"""

import dataclasses
import pathlib
from typing import Any, NamedTuple

import jax
import tyro
from rich.table import Table

from pipejax._internal.figures import new_figure

from . import cluster, report, speedup
from .methods import Problem

HOSTS = 4


class Cell(NamedTuple):
    """One model on one network.

    Attributes:
      problem: The model, and the batch of each host.
      rate: Rate of the link of each host, in each direction.
      together: Whether all methods fit into the memory of this machine at once.
    """

    problem: Problem
    rate: str
    together: bool = True


CELLS = (
    Cell(Problem("softmax", 1024), "100mbit"),
    Cell(Problem("mlp", 1024), "100mbit"),
    Cell(Problem("cnn", 32), "100mbit"),
    Cell(Problem("alexnet", 8), "1gbit", together=False),
    Cell(
        Problem("resnet18", 2, images="imagenet2012"),
        "500mbit",
        together=False,
    ),
)
METHODS = (
    *("PS-Sync", "PS-Async"),
    *("D-Sync", "D-Sync, truncate", "D-Sync, int8"),
    *("Pipe-SGD", "Pipe-SGD, truncate", "Pipe-SGD, int8"),
)
PROFILED = ("PS-Sync", "D-Sync", "D-Sync, truncate", "D-Sync, int8")


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
    """Indices of the models to measure. The result file keeps its other models."""
    data_dir: pathlib.Path | None = None
    """Folder of TFDS data sets. By default, images are random."""
    out: pathlib.Path = report.RESULTS / "paper.json"
    """File to write the result to, as JSON."""
    plot: pathlib.Path = pathlib.Path("docs/paper.png")
    """File to write the picture to, as PNG."""


def main(config: Config) -> None:
    """Measures model by model, prints tables, and writes the result and the picture."""
    jax.config.update("jax_platforms", "cpu")
    cells = speedup.begun(config.out, CELLS)
    for number in config.cells:
        cell = CELLS[number]
        cells[cell] = {**report.origin(), **measured(cell, config)}
        show(cells[cell])
        found = speedup.in_order(cells, CELLS)
        report.save(config.out, seed=0, hosts=HOSTS, cells=found)
    picture(speedup.in_order(cells, CELLS), config.plot)


def measured(cell: Cell, config: Config) -> dict[str, Any]:
    """Returns the figures of one model, from one cluster or one for each method."""
    methods = config.methods
    groups = [methods] if cell.together else [(name,) for name in methods]
    answers = [asked(cell, names, config) for names in groups]
    return {
        "problem": dataclasses.asdict(cell.problem),
        "rate": cell.rate,
        "elements": answers[0]["elements"],
        "images": "random" if config.data_dir is None else "real",
        "rows": rows(answers, cluster.bits_per_second(cell.rate) / 8),
    }


def asked(cell: Cell, names: tuple[str, ...], config: Config) -> dict[str, Any]:
    """Starts a cluster, on which these methods and the compute take turns."""
    profiled = [name for name in names if name in PROFILED]
    images = () if config.data_dir is None else ("--data-dir", str(config.data_dir))
    return cluster.ask(
        cluster.Network.of(HOSTS, (cell.rate,)),
        "experiments.side_by_side",
        [
            *cell.problem.flags(),
            *("--rounds", str(config.rounds), "--steps", str(config.steps)),
            *("--methods", "compute", *names, "--measured", "--profiled", *profiled),
            *images,
        ],
    )


def rows(answers: list[dict[str, Any]], bandwidth: float) -> dict[str, Any]:
    """Returns the figures of each method, in seconds, with the parts of its step.

    Args:
      answers: The answers of the clusters, which have different methods.
      bandwidth: The bytes per second of a link, for the limits.
    """
    profiles = {k: v for answer in answers for k, v in answer["profiles"].items()}
    table: dict[str, Any] = {}
    for answer in answers:
        found = speedup.rows(answer["methods"], bandwidth)
        compute = found.pop("compute")["step"]
        for name, row in found.items():
            spread = answer["methods"][name]["seconds"]
            kept = {key: row[key] for key in ("step", "wire", "cores", "limit")}
            table[name] = {
                **kept,
                "range": [min(spread), max(spread)],
                "compute": compute,
                **parts(name, profiles, compute, row["step"]),
            }
    for row in table.values():
        row["faster_than"] = {
            other: table[other]["step"] / row["step"]
            for other in ("PS-Sync", "PS-Async", "D-Sync")
            if other in table
        }
    return table


def parts(
    name: str, profiles: dict[str, dict[str, float]], compute: float, step: float
) -> dict[str, float]:
    """Returns the codec's work, the exchange, and how well they explain the step.

    Pipe-SGD exchanges as D-Sync does. A method without a profile has no parts.
    """
    profile = profiles.get(name.replace("Pipe-SGD", "D-Sync"))
    if profile is None:
        return {}
    codec, whole = profile["codec"], profile["exchange"]
    hidden = name.startswith("Pipe-SGD")
    estimate = max(compute, whole) if hidden else compute + whole
    exchange = max(whole - codec, 0.0)
    return {"codec": codec, "exchange": exchange, "explained": step / estimate}


def show(cell: dict[str, Any]) -> None:
    """Prints the table of a model."""
    problem, found = cell["problem"], cell["rows"]
    compared = list(next(iter(found.values()))["faster_than"])
    seconds = ("step", "compute", "codec", "exchange", "wire", "cores")
    table = Table(
        *("", *(f"{key}, ms" for key in seconds), "explained"),
        *(f"over {name}" for name in compared),
        title=f"{problem['model']}, batch {problem['batch_size']}, {cell['rate']}",
    )
    for name, row in found.items():
        table.add_row(
            name,
            *(f"{1e3 * row[key]:.0f}" if key in row else "" for key in seconds),
            f"{row['explained']:.2f}" if "explained" in row else "",
            *(f"{row['faster_than'][other]:.2f}" for other in compared),
        )
    report.console(width=140).print(table)


PARTS = {"compute": "tab:gray", "codec": "tab:orange", "exchange": "tab:blue"}


def picture(cells: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws the parts of each step as stacked bars, and the measured step as a line."""
    figure = new_figure(figsize=(3 + 2.6 * len(cells), 3.4), layout="constrained")
    panels = figure.subplots(1, len(cells), squeeze=False)[0]
    for axes, cell in zip(panels, cells, strict=True):
        found = cell["rows"]
        start = dict.fromkeys(found, 0.0)
        for part, color in PARTS.items():
            lengths = [1e3 * row.get(part, 0.0) for row in found.values()]
            axes.barh(
                list(found), lengths, left=[*start.values()], color=color, label=part
            )
            start = {n: start[n] + x for n, x in zip(found, lengths, strict=True)}
        steps = [1e3 * row["step"] for row in found.values()]
        places = range(len(found))
        axes.scatter(
            steps, places, marker="|", s=150, color="black", zorder=3, label="step"
        )
        axes.invert_yaxis()
        axes.set_title(f"{cell['problem']['model']}, {cell['rate']}")
        axes.set_xlabel("milliseconds")
        if axes is not panels[0]:
            axes.set_yticklabels([])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
