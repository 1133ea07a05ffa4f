"""Measures how a delay and a codec change learning, for many replicas.

Questions:

- How much does each way to train with a delay lose, the more replicas share a batch of
  a given size? The more they are, the noisier is a device's own gradient, by which it
  predicts. What is exchanged at once does not depend on their number.
- How much does each codec lose for its bytes, without a delay and with one?

The global batch is the same for any number of replicas. A step runs for all replicas on
one device (`_simulated`), with the program of the real step; for CIFAR-10, whose
convolutions would be slow, on as many virtual devices. The tasks are those of
`experiments.learning`, the text with 64 sequences a batch. Runs are short, which is
hard for a delay: most of its harm comes early, where the loss falls fast. A search in
factors of 2 tunes the learning rate for synchronous training, and every method then
runs at this rate. Methods without prediction have the same result for any number of
replicas, and run for the least.

Command: python -m experiments.replicas --task mnist
         and with --task cifar10, and with --task shakespeare --text tinyshakespeare.txt
         If it is interrupted, start it again: it keeps the runs that have ended.
         With --codecs, it compares codecs, for four replicas.
Result: experiments/results/replicas_TASK.json, once all runs have ended
"""

import dataclasses
import itertools
import json
import math
import pathlib
from typing import Any

import jax
import tyro

from experiments import learning, report
from experiments.convergence import OPTIMIZERS, Run, found, make_task

from ._methods import CODED, DELAYS, METHODS, bytes_of
from ._runs import ON_DEVICES, Result, grid, search, train
from ._table import codec_rows, delay_rows

# The examples of a batch, which the replicas share.
BATCH = {"mnist": 256, "cifar10": 64, "shakespeare": 64}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison."""

    task: str
    """The name of the task, one of `experiments.learning`."""
    codecs: bool = False
    """Compare codecs."""
    optimizers: tuple[str, ...] | None = None
    """The names of the optimizers, by default all, and AdamW and Muon for codecs."""
    methods: tuple[str, ...] | None = None
    """The names of the methods to compare with synchronous training, by default all."""
    replicas: tuple[int, ...] = (4, 16, 64, 256)
    """The numbers of replicas, of which a task takes those that divide its batch."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds of parameters and batches."""
    steps: int = 500
    """The number of steps of every run."""
    data_dir: pathlib.Path | None = None
    """The folder of the TFDS data sets; by default TFDS's own folder."""
    text: pathlib.Path = pathlib.Path("tinyshakespeare.txt")
    """The text file that the transformer learns from."""
    out: pathlib.Path | None = None
    """The file of the result, by default `replicas_TASK.json` beside the others. Runs
    that it already holds are not repeated."""

    @property
    def path(self) -> pathlib.Path:
        """The file of the result."""
        return self.out or report.RESULTS / f"replicas_{self.task}.json"


def main(config: Config) -> Result:
    """Runs what the result does not hold yet, and prints the tables."""
    jax.config.update("jax_platforms", "cpu")
    if config.task in ON_DEVICES:
        jax.config.update("jax_num_cpu_devices", max(counts_of(config)))
    result, task = begun(config), task_of(config)
    methods = config.methods or (*(("K=2", *CODED) if config.codecs else DELAYS),)
    counts = [4] if config.codecs else counts_of(config)
    names = ("adamw", "muon") if config.codecs else (*OPTIMIZERS,)
    for optimizer in config.optimizers or names:
        for run in itertools.chain(
            search(optimizer, result),
            grid(optimizer, methods, counts, config.seeds, result),
        ):
            if found(result["runs"], run) is None:
                ended = train(task, run) | sizes(task, run["method"])
                print(run, ended["test_loss"], ended["test_accuracy"], flush=True)
                result["runs"].append(run | ended | report.provenance())
                report.save(config.path, seed=config.seeds[0], **result)
    console = report.console(width=160)
    console.print(report.table("loss above K=1", delay_rows(result)))
    console.print(report.table("loss above K=1", codec_rows(result)))
    return result


def begun(config: Config) -> Result:
    """Returns the result so far, with the runs that the file already holds."""
    runs: list[Run] = []
    seeds = {*config.seeds}
    if config.path.exists():
        before = json.loads(config.path.read_text())
        if before["steps"] != config.steps:
            raise ValueError(
                f"{config.path} has runs of {before['steps']} steps, not of"
                f" {config.steps}: give another --out, or remove it"
            )
        runs = before["runs"]
        seeds |= {*before["seeds"]}
    return {
        "task": config.task,
        "steps": config.steps,
        "seeds": sorted(seeds),
        "runs": runs,
    }


def task_of(config: Config) -> learning.Task:
    """Returns the task, the text with longer batches than for a few devices."""
    if config.task == "shakespeare":
        size = BATCH[config.task]
        return learning.characters(config.text, batch_size=size, steps=config.steps)
    return make_task(
        config.task, text=config.text, data_dir=config.data_dir, steps=config.steps
    )


def counts_of(config: Config) -> list[int]:
    """Returns the numbers of replicas among which a batch of the task divides."""
    size = BATCH.get(config.task, BATCH["mnist"])
    return [count for count in config.replicas if size % count == 0]


def sizes(task: learning.Task, method: str) -> dict[str, Any]:
    """Returns the bytes an element that a codec sends, if a method has one."""
    codec = METHODS[method].get("codec")
    if codec is None:
        return {}
    leaves = jax.tree.leaves(jax.eval_shape(lambda: task.init(0)))
    shapes = tuple(leaf.shape for leaf in leaves)
    return {"bytes": bytes_of(codec, shapes) / sum(map(math.prod, shapes))}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
