"""How a delay changes what is learned, and what corrects it.

Claim: with `weight_prediction`, a pipeline of width 2 ends within 0.01 nats or 0.2
points of synchronous training, for SGD with momentum, AdamW and Muon, the learning rate
tuned for synchronous training and then left alone: in 8 of 9 cases, of which a plain
delay ends there in 2. At twice that rate it does so in 6, a plain delay in 1.

Three tasks (`experiments.learning`), four virtual devices, the real train step, equal
steps, the same batches, no synchronous warm-up. First the learning rate: that of the
sweep, a factor 2 apart, whose synchronous run of the first seed ends with the least
test loss. Then every method at it; those of `_contenders.TWICE` also at twice that.

Command: python -m experiments.convergence --text tinyshakespeare.txt
         A run that was broken off goes on where it was.
Time: on 2 cores some twenty hours, half of it Muon's. Most of Muon's were run with
      XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT, with
      which JAX 0.10 takes less time for them, and rounds otherwise. A run notes its
      flags, but for the earlier ones: of these Muon's on CIFAR-10 had that, and on the
      other tasks K=1, plain and predicted runs at the tuned rate had none.
Result: experiments/results/convergence.json, docs/convergence.png
"""

import dataclasses
import itertools
import json
import os
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
    """What is run."""

    tasks: tuple[str, ...] = TASKS
    """Of `experiments.learning`."""
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    """Each tuned for every task."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Compared with synchronous training."""
    factors: tuple[float, ...] = (1.0, 2.0)
    """Times the tuned learning rate."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of parameters and batches."""
    steps: int | None = None
    """Of every run; by default the task's own."""
    data_dir: pathlib.Path | None = None
    """Where TFDS data sets lie; by default TFDS's own folder."""
    text: pathlib.Path = pathlib.Path("tinyshakespeare.txt")
    """What the transformer reads."""
    cpu_devices: int = 4
    """Virtual devices."""
    out: pathlib.Path = report.RESULTS / "convergence.json"
    """Where the result goes, and what was there is taken up."""
    plot: pathlib.Path = pathlib.Path("docs/convergence.png")
    """Where the picture goes."""


def main(config: Config) -> dict[str, Any]:
    """Runs what is not there yet; prints the table, draws."""
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
    """Runs what is not there yet, writing each run down."""
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
                    result["runs"].append(run | ended | provenance())
                    report.save(config.out, seed=result["seeds"][0], **result)
    return result


def sweep(task: str, optimizer: str, result: dict[str, Any]) -> Iterator[Run]:
    """The runs that tune the learning rate."""
    for rate in OPTIMIZERS[optimizer].rates:
        yield key(task, optimizer, rate, "K=1", result["seeds"][0])


def grid(
    task: str, optimizer: str, config: Config, result: dict[str, Any]
) -> Iterator[Run]:
    """The runs that are compared; asked for when the sweep has been run."""
    tuned = tuned_rate(task, optimizer, result["seeds"][0], result["runs"])
    methods = ("K=1", *(name for name in config.methods if name != "K=1"))
    for factor, name, seed in itertools.product(config.factors, methods, config.seeds):
        if factor == 1 or name in TWICE:
            yield key(task, optimizer, factor * tuned, name, seed)


def begun(config: Config) -> dict[str, Any]:
    """What there is of the result: of one that was broken off, or is added to."""
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


def provenance() -> dict[str, str]:
    """Of a run: a result is that of several commits, and its flags may differ."""
    flags = os.environ.get("XLA_FLAGS", "")
    return {"commit": report.commit(), "xla_flags": flags}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
