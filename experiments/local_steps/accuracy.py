"""Measures what local steps cost in accuracy, over the length of a round.

Question: how much worse is training in which four groups exchange parameters once in H
steps, and how much of that comes from hiding the exchange?

The tasks are those of `experiments.learning`, at the learning rates that are best for
synchronous training (`experiments.convergence`). Each of four groups takes a quarter of
the batch. Every run ends with a drain, so that all methods are compared after the same
number of steps.

Command: python -m experiments.local_steps.accuracy --text tinyshakespeare.txt
         If it is interrupted, start it again: it keeps the runs that have ended.
Time: about 80 seconds a run on 2 cores, and an hour for all 42.
Result: experiments/results/local_steps_accuracy.json
"""

import dataclasses
import itertools
import json
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import pipejax as pj
from experiments import learning, report
from experiments.convergence import (
    OPTIMIZERS,
    Run,
    differences,
    diverged,
    finite,
    found,
    make_task,
    spread,
    tuned_rate,
)

GROUPS = 4
SYNCHRONOUS = "synchronous"


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the runs."""

    tasks: tuple[str, ...] = ("shakespeare",)
    """The names of the tasks."""
    optimizers: tuple[str, ...] = ("adamw", "muon")
    """The names of the inner optimizers."""
    sync_every: tuple[int, ...] = (4, 16, 64)
    """The numbers of steps of a round."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of parameters and batches."""
    steps: int = 1000
    """The number of steps of a run."""
    text: pathlib.Path = pathlib.Path("tinyshakespeare.txt")
    """The text that the transformer learns from."""
    data_dir: pathlib.Path | None = None
    """The folder of the TFDS data sets; by default TFDS's own folder."""
    out: pathlib.Path = report.RESULTS / "local_steps_accuracy.json"
    """The file of the result. Runs that it already holds are not repeated."""


def main(config: Config) -> list[Run]:
    """Runs what the result does not hold yet, and prints the table."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", GROUPS)
    cells = report.kept(config.out)
    tuning = json.loads((report.RESULTS / "convergence.json").read_text())
    for run in runs(config, tuning["runs"]):
        if found(cells, run) is None:
            task = make_task(
                run["task"],
                text=config.text,
                data_dir=config.data_dir,
                steps=config.steps,
            )
            cells.append({**run, **report.origin(), **trained(task, run)})
            print(run, cells[-1]["test_loss"], flush=True)
            report.save(config.out, seed=run["seed"], cells=cells)
    report.console(width=120).print(report.table("loss above synchronous", rows(cells)))
    return cells


def runs(config: Config, tuning: list[Run]) -> Iterator[Run]:
    """Yields what identifies each run, seed by seed."""
    rounds = [(h, v) for h in config.sync_every for v in (0, h)]
    for seed, task, name in itertools.product(
        config.seeds, config.tasks, config.optimizers
    ):
        rate = tuned_rate(task, name, 0, tuning)
        for every, overlap in ((1, 0), *rounds):
            yield {
                "task": task,
                "optimizer": name,
                "rate": rate,
                "steps": config.steps,
                "sync_every": every,
                "overlap_steps": overlap,
                "seed": seed,
            }


def trained(task: learning.Task, run: Run) -> dict[str, Any]:
    """Returns the test results after a run, and its mean losses."""
    optimizer = OPTIMIZERS[run["optimizer"]].make(task.schedule(run["rate"]))
    tx, mesh = optax.chain(task.clip, optimizer), pj.data_mesh(GROUPS)
    train: pj.TrainStep | pj.LocalTrainStep
    if run["sync_every"] == 1:
        train = pj.make_train_step(task.loss, tx, mesh=mesh, width=1)
    else:
        train = pj.make_local_step(
            task.loss,
            tx,
            mesh=mesh,
            sync_every=run["sync_every"],
            overlap_steps=run["overlap_steps"],
        )
    state: Any = train.init(task.init(run["seed"]))
    losses = []
    for batch in itertools.islice(task.batches(run["seed"]), task.steps):
        state, info = train.step(state, batch)
        own = info.loss if isinstance(info, pj.StepInfo) else info.local_loss
        losses.append(jnp.asarray(own).mean())
    state, _ = train.drain(state)
    parts = np.array_split([float(loss) for loss in losses], 25)
    ended = task.test(jax.device_get(state.params))
    return {
        **{name: finite(value) for name, value in ended.items()},
        "losses": [finite(float(np.mean(part))) for part in parts],
    }


def rows(cells: list[Run]) -> list[list[str]]:
    """Returns titles, then a row for each task, optimizer and length of a round.

    A cell is the change of test loss from synchronous training: the mean over seeds,
    with its standard error.
    """
    titles = ["task", "optimizer", "test loss, synchronous", "H", "at once", "hidden"]
    table, lengths = [titles], sorted({cell["sync_every"] for cell in cells} - {1})
    names = dict.fromkeys((cell["task"], cell["optimizer"]) for cell in cells)
    for (task, optimizer), every in itertools.product(names, lengths):
        known = {"task": task, "optimizer": optimizer}
        base = same(cells, known | {"sync_every": 1})
        rounds = (known | {"sync_every": every, "overlap_steps": v} for v in (0, every))
        changes = (change(same(cells, each), base) for each in rounds)
        mean = f"{statistics.mean(run['test_loss'] for run in base):.3f}"
        table.append([task, optimizer, mean, str(every), *changes])
    return table


def same(cells: list[Run], wanted: Run) -> list[Run]:
    """Returns the runs with these values, one for each seed."""
    return [cell for cell in cells if wanted.items() <= cell.items()]


def change(runs: list[Run], base: list[Run]) -> str:
    """Returns the mean change of test loss, with its error, over the seeds of both."""
    if diverged(runs):
        return "diverged"
    changes = differences(runs, base, "test_loss")
    return spread(changes, 3) if changes else ""


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
