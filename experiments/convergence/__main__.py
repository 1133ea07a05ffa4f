"""Measures how a delay changes learning, and which methods correct this.

Claim: with `weight_prediction`, a pipeline of width 2 ends within 0.01 nats or 0.2
points of synchronous training in 8 of 9 cases, a plain delay in 2 of 9. The cases are
three tasks with each of SGD with momentum, AdamW and Muon. The learning rate is tuned
for synchronous training and then left alone. At twice that rate, weight prediction
ends as near in 6 of 9 cases, a plain delay in 1.

The tasks are those of `experiments.learning`. All methods run the real train step on
four virtual devices, for the same number of steps on the same batches, and without
synchronous warm-up. First, a sweep in factors of 2 tunes the learning rate: it chooses
the rate at which the synchronous run of the first seed ends with the lowest test loss.
Then every method runs at this rate. The methods of `_contenders.TWICE` also run at
twice this rate.

Command: python -m experiments.convergence --text tinyshakespeare.txt
         If it is interrupted, start it again: it keeps the runs that have ended.
Time: on 2 cores some twenty hours, half of it Muon's. Most of Muon's were run with
      XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT, with
      which JAX 0.10 takes less time for them, and rounds differently. The result has
      the flags of every run except the earlier ones. Muon's earlier runs had this flag
      on CIFAR-10. On the other tasks, Muon's earlier runs of K=1, plain and predicted
      at the tuned rate had no flags.
Result: experiments/results/convergence.json, docs/convergence.png
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import tyro

from experiments import report

from ._contenders import METHODS, OPTIMIZERS, TWICE
from ._picture import picture
from ._runs import Run, found, key, tuned_rate
from ._show import counts, ends, rows
from ._tasks import TASKS, make_task
from ._train import train


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison."""

    tasks: tuple[str, ...] = TASKS
    """The names of the tasks, which are those of `experiments.learning`."""
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    """The names of the optimizers, whose rate is tuned for every task."""
    methods: tuple[str, ...] = tuple(METHODS)
    """The names of the methods to compare with synchronous training."""
    factors: tuple[float, ...] = (1.0, 2.0)
    """The learning rates to compare at, as multiples of the tuned rate."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds of parameters and batches."""
    steps: int | None = None
    """The number of steps of every run; by default that of the task."""
    data_dir: pathlib.Path | None = None
    """The folder of the TFDS data sets; by default TFDS's own folder."""
    text: pathlib.Path = pathlib.Path("tinyshakespeare.txt")
    """The text file that the transformer learns from."""
    cpu_devices: int = 4
    """The number of virtual devices."""
    out: pathlib.Path = report.RESULTS / "convergence.json"
    """The file of the result. Runs that it already holds are not repeated."""
    plot: pathlib.Path = pathlib.Path("docs/convergence.png")
    """The file that the picture is written to."""


def main(config: Config) -> dict[str, Any]:
    """Runs what the result does not hold yet, prints the tables, and draws."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    result = run_all(config)
    report.console(width=160).print(report.table("beside K=1", rows(result)))
    report.console(width=160).print(report.table("how runs end", ends(result)))
    report.console(width=160).print(
        report.table("how many end near K=1", counts(result))
    )
    picture(result, config.plot)
    return result


def run_all(config: Config) -> dict[str, Any]:
    """Runs what the result does not hold yet, and saves the result after each run."""
    result = begun(config)
    for name in config.tasks:
        task = make_task(
            name, text=config.text, data_dir=config.data_dir, steps=config.steps
        )
        for optimizer in config.optimizers:
            for run in itertools.chain(
                sweep(name, optimizer, result), grid(name, optimizer, config, result)
            ):
                if found(result["runs"], run) is None:
                    ended = train(
                        task,
                        METHODS[run["method"]],
                        OPTIMIZERS[run["optimizer"]],
                        rate=run["rate"],
                        seed=run["seed"],
                        devices=config.cpu_devices,
                    )
                    print(run, ended["test_loss"], ended["test_accuracy"], flush=True)
                    result["runs"].append(run | ended | report.provenance())
                    report.save(config.out, seed=result["seeds"][0], **result)
    return result


def sweep(task: str, optimizer: str, result: dict[str, Any]) -> Iterator[Run]:
    """Yields the runs that tune the learning rate."""
    for rate in OPTIMIZERS[optimizer].rates:
        yield key(task, optimizer, rate, "K=1", result["seeds"][0])


def grid(
    task: str, optimizer: str, config: Config, result: dict[str, Any]
) -> Iterator[Run]:
    """Yields the runs that are compared. The runs of the sweep must have ended."""
    tuned = tuned_rate(task, optimizer, result["seeds"][0], result["runs"])
    methods = ("K=1", *(name for name in config.methods if name != "K=1"))
    for factor, name, seed in itertools.product(config.factors, methods, config.seeds):
        if factor == 1 or name in TWICE:
            yield key(task, optimizer, factor * tuned, name, seed)


def begun(config: Config) -> dict[str, Any]:
    """Returns the result so far, with the runs that the file already holds."""
    common = {"cpu_devices": config.cpu_devices, "steps": config.steps}
    before: dict[str, Any] = {"factors": [], "seeds": [], "runs": []}
    if config.out.exists():
        before = json.loads(config.out.read_text())
        if not common.items() <= before.items():
            raise ValueError(
                f"{config.out} has runs of other settings than {common}: give another"
                " --out, or remove it"
            )
    return common | {
        "factors": list(dict.fromkeys((*before["factors"], *config.factors))),
        "seeds": list(dict.fromkeys((*before["seeds"], *config.seeds))),
        "runs": before["runs"],
    }


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
