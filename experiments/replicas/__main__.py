"""Measures how a delay changes learning, by the number of replicas that share a batch.

Question: how much does each way to train with a delay lose, the more replicas share a
batch of a given size? The more they are, the noisier is a device's own gradient, by
which it predicts. What is exchanged at once does not depend on their number.

The global batch is the same for any number of replicas. A step runs for all replicas on
one device (`_simulated`), with the program of the real step. The tasks are those of
`experiments.learning`, the text with 64 sequences a batch. As in
`experiments.convergence`, a sweep in factors of 2 tunes the learning rate for
synchronous training, and every method then runs at this rate.

Command: python -m experiments.replicas --text tinyshakespeare.txt
         If it is interrupted, start it again: it keeps the runs that have ended.
Result: experiments/results/replicas.json, once all runs have ended
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import tyro

import pipejax as pj
from experiments import learning, report
from experiments.convergence import (
    OPTIMIZERS,
    TASKS,
    Run,
    finite,
    found,
    make_task,
    tuned_rate,
)

from ._simulated import Simulated

# The arguments of `pj.make_train_step` by the name of a method.
METHODS: dict[str, dict[str, Any]] = {
    "K=1": {"width": 1},
    "K=2": {},
    "K=2, own": {"weight_prediction": "own"},
    "K=2, plain": {"weight_prediction": False},
    "K=2, rank 4 at once": {"at_once": 4},
    "K=2, rank 16 at once": {"at_once": 16},
}
# The examples of a batch, which the replicas share.
BATCH = {"mnist": 256, "cifar10": 64, "shakespeare": 64}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison."""

    tasks: tuple[str, ...] = TASKS
    """The names of the tasks, which are those of `experiments.learning`."""
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    """The names of the optimizers, whose rate is tuned for every task."""
    methods: tuple[str, ...] = tuple(METHODS)
    """The names of the methods to compare with synchronous training."""
    replicas: tuple[int, ...] = (4, 16, 64, 256)
    """The numbers of replicas, of which a task takes those that divide its batch."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds of parameters and batches."""
    steps: int | None = None
    """The number of steps of every run; by default that of the task."""
    data_dir: pathlib.Path | None = None
    """The folder of the TFDS data sets; by default TFDS's own folder."""
    text: pathlib.Path = pathlib.Path("tinyshakespeare.txt")
    """The text file that the transformer learns from."""
    out: pathlib.Path = report.RESULTS / "replicas.json"
    """The file of the result. Runs that it already holds are not repeated."""


def main(config: Config) -> dict[str, Any]:
    """Runs what the result does not hold yet, and prints the table."""
    jax.config.update("jax_platforms", "cpu")
    result = begun(config)
    for name, optimizer in itertools.product(config.tasks, config.optimizers):
        task = task_of(name, config)
        for run in itertools.chain(
            sweep(name, optimizer, result), grid(name, optimizer, config, result)
        ):
            if found(result["runs"], run) is None:
                ended = train(task, run)
                print(run, ended["test_loss"], flush=True)
                result["runs"].append(run | ended | {"commit": report.commit()})
                report.save(config.out, seed=config.seeds[0], **result)
    report.console(width=120).print(report.table("loss above K=1", rows(result)))
    return result


def begun(config: Config) -> dict[str, Any]:
    """Returns the result so far, with the runs that the file already holds."""
    runs: list[Run] = []
    if config.out.exists():
        before = json.loads(config.out.read_text())
        if before["steps"] != config.steps:
            raise ValueError(
                f"{config.out} has runs of {before['steps']} steps, not of"
                f" {config.steps}: give another --out, or remove it"
            )
        runs = before["runs"]
    return {"steps": config.steps, "seeds": list(config.seeds), "runs": runs}


def task_of(name: str, config: Config) -> learning.Task:
    """Returns a task, the text with longer batches than for a few devices."""
    if name == "shakespeare":
        return learning.characters(
            config.text, batch_size=BATCH[name], steps=config.steps or 1000
        )
    return make_task(
        name, text=config.text, data_dir=config.data_dir, steps=config.steps
    )


def key(
    task: str, optimizer: str, rate: float, method: str, replicas: int, seed: int
) -> Run:
    """Returns the values that identify a run. Synchronous runs have one replica."""
    return {
        "task": task,
        "optimizer": optimizer,
        "rate": rate,
        "method": method,
        "replicas": 1 if METHODS[method].get("width") == 1 else replicas,
        "seed": seed,
    }


def sweep(task: str, optimizer: str, result: dict[str, Any]) -> Iterator[Run]:
    """Yields the runs that tune the learning rate."""
    for rate in OPTIMIZERS[optimizer].rates:
        yield key(task, optimizer, rate, "K=1", 1, result["seeds"][0])


def grid(
    task: str, optimizer: str, config: Config, result: dict[str, Any]
) -> Iterator[Run]:
    """Yields the runs that are compared. The runs of the sweep must have ended."""
    rate = tuned_rate(task, optimizer, result["seeds"][0], result["runs"])
    methods = ("K=1", *(name for name in config.methods if name != "K=1"))
    for seed, method, replicas in itertools.product(
        config.seeds, methods, replicas_of(task, config)
    ):
        yield key(task, optimizer, rate, method, replicas, seed)


def replicas_of(task: str, config: Config) -> list[int]:
    """Returns the numbers of replicas among which a batch of the task divides."""
    size = BATCH.get(task, BATCH["mnist"])
    return [count for count in config.replicas if size % count == 0]


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Returns a row for each case: the test loss above that of synchronous training.

    A cell is the mean over the seeds that have been run, and its standard error.
    """
    runs, titles = result["runs"], ["task", "optimizer", "replicas"]
    methods = [name for name in METHODS if name != "K=1"]
    cases = dict.fromkeys(
        (run["task"], run["optimizer"], run["replicas"])
        for run in runs
        if run["method"] != "K=1"
    )
    table = [[*titles, *methods]]
    for case in cases:
        task, optimizer, replicas = case
        rate = tuned_rate(task, optimizer, result["seeds"][0], runs)
        row = [task, optimizer, str(replicas)]
        for method in methods:
            pairs = [
                [
                    found(runs, key(task, optimizer, rate, name, replicas, seed))
                    for name in ("K=1", method)
                ]
                for seed in result["seeds"]
            ]
            row.append(_above([pair for pair in pairs if all(pair)]))
        table.append(row)
    return table


def _above(pairs: list[list[Any]]) -> str:
    """Returns how much higher the second runs end than the first, over the seeds."""
    ends = [[run["test_loss"] for run in pair] for pair in pairs]
    if any(None in pair for pair in ends):
        return "diverged"
    if not ends:
        return ""
    above = np.array([later - first for first, later in ends])
    error = above.std(ddof=1) / len(above) ** 0.5 if len(above) > 1 else np.nan
    return f"{above.mean():+.4f} ± {error:.4f}"


def train(task: learning.Task, run: Run) -> dict[str, Any]:
    """Returns the test results after a run."""
    optimizer = OPTIMIZERS[run["optimizer"]]
    tx = optax.chain(task.clip, optimizer.make(task.schedule(run["rate"])))
    settings = dict(METHODS[run["method"]])
    if rank := settings.pop("at_once", None):
        key = jax.random.key(run["seed"])
        settings["at_once"] = pj.codecs.power_sgd(rank, key)
    step = pj.make_train_step(
        task.loss, tx, mesh=pj.data_mesh(1), executor="fused", **settings
    )
    simulated = Simulated(step, run["replicas"])
    state = simulated.init(task.init(run["seed"]))
    state, losses = simulated.run(state, task.batches(run["seed"]), task.steps)
    end = task.test(jax.device_get(simulated.drained(state)))
    reported = losses[step.width - 1 :]  # no earlier loss has arrived
    parts = np.array_split(reported, min(25, len(reported)))
    means = [float(np.mean(part)) for part in parts]
    return {
        **{name: finite(value) for name, value in end.items()},
        "losses": [finite(loss) for loss in means],
    }


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
