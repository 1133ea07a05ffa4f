"""D-Sync and Pipe-SGD side by side: accuracy on four devices, time on four hosts.

Claims: width 2 sends what width 1 sends, in one collective, and learns as well; where
there is a network to wait for, its steps are shorter.

Command: make demo
Time: about a minute and a half on 2 cores, after installation.
Result: two tables, runs/demo/curves.png and a folder for each run.
"""

import dataclasses
import pathlib
import shutil
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from . import cluster, logs, speedup, train
from .methods import Problem

METHODS = ("compute", "D-Sync", "Pipe-SGD", "Pipe-SGD, int8")
RUNS = {"D-Sync (K=1)": 1, "Pipe-SGD (K=2)": 2}


@dataclasses.dataclass(frozen=True)
class Config:
    """The two runs."""

    steps: int = 1000
    """A run."""
    devices: int = 4
    """Virtual CPU devices."""
    out: pathlib.Path = pathlib.Path("runs/demo")
    """Made anew every time."""


def main(config: Config) -> None:
    """Trains both, prints the table, draws the curves."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", config.devices)
    console = Console()
    console.print(
        "Digits, an MLP with AdamW, global batch 64 on"
        f" {config.devices} virtual CPU devices."
    )
    folders = {label: config.out / f"width-{width}" for label, width in RUNS.items()}
    results = {}
    for label, width in RUNS.items():
        shutil.rmtree(folders[label], ignore_errors=True)
        run = train.Config(width=width, steps=config.steps, out=folders[label])
        results[label] = train.run(run, console)
    console.print(_table(results, config.steps))
    curves = config.out / "curves.png"
    logs.draw_curves(folders, curves)
    console.print(f"Curves: {curves}; runs: {config.out}/width-*")
    if why := cluster.reason_why_not():
        console.print(f"Time on emulated hosts is left out. {why}")
    else:
        console.print(_times(config.out, console))


def _times(out: pathlib.Path, console: Console) -> Table:
    """Step times on four hosts with real TCP between."""
    problem, rate, log = Problem("wide_mlp", 128), "500mbit", out / "hosts.log"
    console.print(
        f"Four emulated hosts with links of 500 Mbit/s, {4e-6 * problem.elements:.0f}"
        f" MB of gradients; what the hosts print goes to {log}"
    )
    with log.open("w") as file:
        figures = cluster.ask(
            cluster.Network.of(4, (rate,)),
            "experiments.side_by_side",
            [
                *problem.flags(),
                *("--methods", *METHODS, "--measured", "--rounds", "5", "--steps", "1"),
            ],
            file,
        )
    found = speedup.rows(figures["methods"], cluster.bits_per_second(rate) / 8)
    table = Table(title="Of a step, medians of 5 rounds; limit: compute or wire")
    columns = ("", "ms", "least - greatest", "MB sent", "limit, ms", "times D-Sync")
    for column in columns:
        table.add_column(column)
    for name, row in found.items():
        measured = figures["methods"][name]
        seconds = measured["seconds"]
        table.add_row(
            name,
            f"{1e3 * row['step']:.0f}",
            f"{1e3 * min(seconds):.0f} - {1e3 * max(seconds):.0f}",
            f"{1e-6 * measured['wire_bytes']:.1f}",
            f"{1e3 * row['limit']:.0f}",
            f"{row['faster_than']['D-Sync'][1]:.2f}",
        )
    return table


def _table(results: dict[str, Any], steps: int) -> Table:
    table = Table(title=f"{steps:,} steps, then a drain; per step and device")
    for column in ("", "test accuracy", "steps/s", "collectives", "bytes sent"):
        table.add_column(column)
    for label, row in results.items():
        table.add_row(
            label,
            f"{100 * row['test_accuracy']:.1f} %",
            f"{row['steps_per_second']:.0f}",
            str(len(row["collectives"])),
            f"{row['bytes_sent']:,.0f}",
        )
    return table


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
