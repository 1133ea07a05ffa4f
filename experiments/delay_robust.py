"""Compares the rule of `delay_robust` with a grid search of its two numbers.

Claim: the rule of `delay_robust` derives share and decay from momentum and width. With
these two numbers, training ends at about the same test loss as with the best pair of a
grid. The claim is for SGD with momentum and for AdamW, at widths 2 and 3.

The model is the MLP of `experiments.convergence`, on MNIST. The learning rates are
those that were tuned there for synchronous training, which is also run here.

Command: python -m experiments.delay_robust
Time: about 40 minutes on 2 cores.
Result: experiments/results/delay_robust.json
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import tyro

from pipejax import transforms

from . import convergence, data, learning, report


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the grid."""

    optimizers: tuple[str, ...] = ("momentum", "adamw")
    """Optimizers to train with, by their names in `experiments.convergence`."""
    widths: tuple[int, ...] = (2, 3)
    """Pipeline widths K to train at."""
    shares: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    """Shares of the current gradient in an update, to search."""
    averaged: tuple[float, ...] = (0.005, 0.01, 0.02, 0.05)
    """Values of 1 - decay to search. The decay is that of the average of gradients."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the parameters and of the batches."""
    steps: int = 1500
    """Number of steps of each run."""
    data: str = "mnist"
    """Name of the data set: digits, or a TFDS name."""
    data_dir: pathlib.Path | None = None
    """Folder of TFDS data sets. By default $TFDS_DATA_DIR, or ~/tensorflow_datasets."""
    cpu_devices: int = 4
    """Number of virtual CPU devices."""
    out: pathlib.Path = report.RESULTS / "delay_robust.json"
    """File to write the result to, as JSON."""


RATES = {"momentum": 0.1, "adamw": 0.004}
SYNCHRONOUS, RULE = "synchronous", "rule"


def main(config: Config) -> dict[str, Any]:
    """Trains the whole grid, prints the table, and writes the result file."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    dataset = data.load(config.data, data_dir=config.data_dir)
    task = learning.classifier("mlp", dataset, batch_size=256, steps=config.steps)
    found: dict[str, dict[str, list[float | None]]] = {}
    for optimizer, width in itertools.product(config.optimizers, config.widths):
        found[f"{optimizer}, K={width}"] = {
            name: losses(task, how, optimizer, config)
            for name, how in contenders(width, config)
        }
        settings = report.settings(config)
        report.save(config.out, **settings, rates=RATES, test_loss=found)
    report.console().print(report.table("test loss", rows(found)))
    return found


def contenders(width: int, config: Config) -> Iterator[tuple[str, convergence.Method]]:
    """Yields synchronous training, the rule, and every pair of the grid, with names."""
    yield SYNCHRONOUS, convergence.Method(1)
    yield RULE, robust(width)
    for share, averaged in itertools.product(config.shares, config.averaged):
        yield f"{share:g}, {averaged:g}", robust(width, share=share, decay=1 - averaged)


def robust(width: int, **chosen: float) -> convergence.Method:
    """Returns a method that applies `delay_robust` after the optimizer.

    The second moment of AdamW then sees the gradients themselves.
    """
    correction = functools.partial(transforms.delay_robust, width=width, **chosen)
    return convergence.Method(width, after=correction)


def losses(
    task: learning.Task, how: convergence.Method, optimizer: str, config: Config
) -> list[float | None]:
    """Returns the final test loss of each seed, and `None` if the run diverged."""
    run = functools.partial(
        convergence.train,
        task,
        how,
        convergence.OPTIMIZERS[optimizer],
        rate=RATES[optimizer],
        devices=config.cpu_devices,
    )
    return [run(seed=seed)["test_loss"] for seed in config.seeds]


def rows(found: dict[str, dict[str, list[float | None]]]) -> list[list[str]]:
    """Returns the table: a row of titles, then a row for each optimizer and width.

    A row has the mean losses of synchronous training, of the rule and of the best pair
    of the grid, and the best pair.
    """
    table = [["", SYNCHRONOUS, RULE, "best of the grid", "its share, 1 - decay"]]
    for title, row in found.items():
        means = {name: mean(values) for name, values in row.items()}
        pairs = [name for name in means if name not in (SYNCHRONOUS, RULE)]
        best = min(pairs, key=lambda name: means[name])
        numbers = (f"{means[name]:.4f}" for name in (SYNCHRONOUS, RULE, best))
        table.append([title, *numbers, best])
    return table


def mean(values: list[float | None]) -> float:
    """Returns the mean, or infinity if any run diverged."""
    finite = [value for value in values if value is not None]
    return statistics.mean(finite) if len(finite) == len(values) else math.inf


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
