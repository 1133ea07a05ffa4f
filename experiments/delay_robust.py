"""The rule of `delay_robust` beside a search of its two numbers.

Claim: the share and the decay that it takes from momentum and width end about where the
best of a grid do, for SGD with momentum and for AdamW, at widths 2 and 3.

MNIST and the MLP of `experiments.convergence`, at the learning rates tuned there for
synchronous training, which is run beside.

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

from pipejax import corrections

from . import convergence, data, learning, report


@dataclasses.dataclass(frozen=True)
class Config:
    """The grid."""

    optimizers: tuple[str, ...] = ("momentum", "adamw")
    """Of `experiments.convergence`."""
    widths: tuple[int, ...] = (2, 3)
    """Of the pipeline."""
    shares: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    """Of the gradient itself in an update."""
    averaged: tuple[float, ...] = (0.005, 0.01, 0.02, 0.05)
    """1 - decay, of the rest."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of parameters and batches."""
    steps: int = 1500
    """Of every run."""
    data: str = "mnist"
    """Data set."""
    data_dir: pathlib.Path | None = None
    """Where TFDS data sets lie; by default TFDS's own folder."""
    cpu_devices: int = 4
    """Virtual devices."""
    out: pathlib.Path = report.RESULTS / "delay_robust.json"
    """Where the result goes."""


RATES = {"momentum": 0.1, "adamw": 0.004}
SYNCHRONOUS, RULE = "synchronous", "rule"


def main(config: Config) -> dict[str, Any]:
    """Runs the grid, prints the table, writes the result file."""
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
    """Synchronous training, the rule, and every pair of the grid."""
    yield SYNCHRONOUS, convergence.Method(1)
    yield RULE, robust(width)
    for share, averaged in itertools.product(config.shares, config.averaged):
        yield f"{share:g}, {averaged:g}", robust(width, share=share, decay=1 - averaged)


def robust(width: int, **chosen: float) -> convergence.Method:
    """After the optimizer, so that AdamW's second moment sees gradients as they are."""
    correction = functools.partial(corrections.delay_robust, width=width, **chosen)
    return convergence.Method(width, after=correction)


def losses(
    task: learning.Task, how: convergence.Method, optimizer: str, config: Config
) -> list[float | None]:
    """Test loss in the end, seed by seed; None where it diverged."""
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
    """Titles, then an optimizer and width a row: means, and the best pair."""
    table = [["", SYNCHRONOUS, RULE, "best of the grid", "its share, 1 - decay"]]
    for title, row in found.items():
        means = {name: mean(values) for name, values in row.items()}
        pairs = [name for name in means if name not in (SYNCHRONOUS, RULE)]
        best = min(pairs, key=lambda name: means[name])
        numbers = (f"{means[name]:.4f}" for name in (SYNCHRONOUS, RULE, best))
        table.append([title, *numbers, best])
    return table


def mean(values: list[float | None]) -> float:
    """Infinite if one of them diverged."""
    finite = [value for value in values if value is not None]
    return statistics.mean(finite) if len(finite) == len(values) else math.inf


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
