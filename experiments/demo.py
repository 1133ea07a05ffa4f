"""Digits under D-Sync and under Pipe-SGD, side by side, on four virtual devices.

Claim: width 2 sends what width 1 sends, in one collective, and learns as well.

Command: make demo
Time: about 40 seconds on 2 cores, after installation.
Result: a table, runs/demo/curves.png and a folder for each run.
"""

import pathlib
import shutil
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from . import logs, train

OUT = pathlib.Path("runs/demo")
RUNS = {"D-Sync (K=1)": 1, "Pipe-SGD (K=2)": 2}
DEVICES = 4


def main() -> None:
    """Trains both, prints the table, draws the curves."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    console = Console()
    console.print(
        f"Digits, an MLP with AdamW, global batch 64 on {DEVICES} virtual CPU devices."
    )
    shutil.rmtree(OUT, ignore_errors=True)
    folders = {label: OUT / f"width-{width}" for label, width in RUNS.items()}
    results = {
        label: train.run(train.Config(width=width, out=folders[label]), console)
        for label, width in RUNS.items()
    }
    console.print(_table(results))
    logs.draw_curves(folders, OUT / "curves.png")
    console.print(f"Curves: {OUT / 'curves.png'}; runs: {OUT}/width-*")
    console.print(
        "What one machine cannot show is the gain in wall-clock time: its devices share"
        " cores and have no network between them, so there is nothing to hide. On"
        " several hosts a step takes compute + communication with K=1, and the longer"
        " of the two with K=2."
    )


def _table(results: dict[str, Any]) -> Table:
    table = Table(title="1,000 steps, then a drain; per step and device")
    for column in ("", "test accuracy", "steps/s", "collectives", "bytes summed"):
        table.add_column(column)
    for label, row in results.items():
        table.add_row(
            label,
            f"{100 * row['test_accuracy']:.1f} %",
            f"{row['steps_per_second']:.0f}",
            str(len(row["all_reduce_bytes"])),
            f"{sum(row['all_reduce_bytes']):,}",
        )
    return table


if __name__ == "__main__":
    main()
