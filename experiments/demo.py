"""Digits under D-Sync and under Pipe-SGD, side by side, on four virtual devices.

Claim: width 2 sends what width 1 sends, in one collective, and learns as well.

Command: make demo
Time: about 40 seconds on 2 cores, after installation.
Result: a table, runs/demo/curves.png and a folder for each run.
"""

import dataclasses
import pathlib
import shutil
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from . import logs, train

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
    console.print(
        "What one machine cannot show is the gain in wall-clock time: its devices share"
        " cores and have no network between them, so there is nothing to hide. On"
        " several hosts a step takes compute + communication with K=1, and the longer"
        " of the two with K=2."
    )


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
