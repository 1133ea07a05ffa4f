"""What a delay does to accuracy, plain, before any correction: widths 1 to 3.

Claim: on MNIST AdamW does not notice one step of delay, and does notice two. SGD with
momentum 0.9, at a learning rate that suits synchronous training, fails with one: the
largest stable learning rate falls from 2(1 + mu) to 1 - mu over the curvature, 3.8 to
0.1 (linear stability of the recursion on a quadratic).

Command: python -m experiments.widths --data-dir ~/tensorflow_datasets
Time: about 6 minutes on 2 cores.
Result: experiments/results/widths.json
"""

import dataclasses
import itertools
import pathlib
import statistics
import tempfile
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from . import report, task, train


@dataclasses.dataclass(frozen=True)
class Config:
    """The grid; every run is one of `experiments.train`."""

    data: str = "mnist"
    """Data set."""
    data_dir: pathlib.Path | None = None
    """Where it lies."""
    widths: tuple[int, ...] = (1, 2, 3)
    """Pipeline widths."""
    optimizers: tuple[task.Optimizer, ...] = ("adamw", "momentum")
    """At learning rates 1e-3 and 0.1."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of parameters and order."""
    steps: int = 1500
    """A run."""
    batch_size: int = 256
    """Global."""
    cpu_devices: int = 2
    """Virtual."""
    out: pathlib.Path = report.RESULTS / "widths.json"
    """Where the result goes."""


LEARNING_RATES = {"sgd": 0.1, "momentum": 0.1, "adamw": 1e-3}


def main(config: Config) -> dict[str, Any]:
    """Runs the grid, prints the table, writes the result file."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    console = Console()
    rows = {
        f"{optimizer}, width {width}": [
            accuracy(config, optimizer, width, seed, console) for seed in config.seeds
        ]
        for optimizer, width in itertools.product(config.optimizers, config.widths)
    }
    report.save(
        config.out,
        **report.settings(config),
        learning_rates={name: LEARNING_RATES[name] for name in config.optimizers},
        test_accuracy=rows,
    )
    table = Table("", "test accuracy, mean", "least", "greatest")
    for name, values in rows.items():
        numbers = (statistics.mean(values), min(values), max(values))
        table.add_row(name, *(f"{100 * x:.1f} %" for x in numbers))
    console.print(table)
    return rows


def accuracy(
    config: Config, optimizer: task.Optimizer, width: int, seed: int, console: Console
) -> float:
    """Test accuracy of one run, after its drain."""
    with tempfile.TemporaryDirectory() as folder:
        run = train.Config(
            data=config.data,
            data_dir=config.data_dir,
            optimizer=optimizer,
            learning_rate=LEARNING_RATES[optimizer],
            weight_decay=0.0,
            width=width,
            weight_prediction=False,
            seed=seed,
            steps=config.steps,
            batch_size=config.batch_size,
            checkpoint_every=0,
            out=pathlib.Path(folder) / "run",
        )
        return float(train.run(run, console)["test_accuracy"])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
