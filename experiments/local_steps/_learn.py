"""Runs of local steps, and of the methods beside them, from first to last step."""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pipejax as pj
from experiments import learning, methods, report
from experiments.convergence import (
    Run,
    differences,
    diverged,
    finite,
    found,
    spread,
)
from pipejax import codecs, collectives

from ._tasks import optimizer_of, task_of

GROUPS = 4
CODECS = {"int8": codecs.int8(), "int4": codecs.int4()}


class Method(NamedTuple):
    """A way to exchange, as it identifies a run.

    Attributes:
      method: `"local"`, or `"pipeline"`, whose steps exchange gradients.
      sync_every: The steps H of a round, or the width of the pipeline.
      overlap_steps: The steps V of a round that have a chunk beside them.
      codec: The name of the codec, which has error feedback, or `None`.
    """

    method: str
    sync_every: int
    overlap_steps: int = 0
    codec: str | None = None


SYNCHRONOUS = Method("pipeline", 1)


def local(every: int, overlap: int, codec: str | None = None) -> Method:
    """Returns local steps of rounds of `every` steps."""
    return Method("local", every, overlap, codec)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the runs."""

    tasks: tuple[str, ...] = ("shakespeare",)
    """The names of the tasks."""
    optimizers: tuple[str, ...] = ("adamw", "muon")
    """The names of the inner optimizers."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of parameters and batches."""
    steps: int = 1000
    """The number of steps of a run without exchanges that add to its time."""
    text: pathlib.Path = pathlib.Path("tinyshakespeare.txt")
    """The text that the transformer learns from."""
    data_dir: pathlib.Path | None = None
    """The folder of the TFDS data sets; by default TFDS's own folder."""


def run_all(
    config: Config, wanted: Iterable[Run], out: pathlib.Path, known: list[Run]
) -> list[Run]:
    """Runs what is neither in the result nor in `known`, and saves after each run."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", GROUPS)
    cells = report.kept(out)
    for run in wanted:
        if found([*cells, *known], run) is None:
            task = task_of(run, text=config.text, data_dir=config.data_dir)
            cells.append({**run, **report.origin(), **trained(task, run)})
            print(run, cells[-1]["test_loss"], flush=True)
            report.save(out, seed=run["seed"], cells=cells)
    return cells


def trained(task: learning.Task, run: Run) -> dict[str, Any]:
    """Returns the test results after a run, and its mean losses.

    A run ends with a drain, so that all methods are compared after the same number of
    steps.
    """
    train = make_step(task.loss, optimizer_of(task, run), run)
    state: Any = train.init(task.init(run["seed"]))
    losses = []
    for batch in itertools.islice(task.batches(run["seed"]), task.steps):
        state, info = train.step(state, batch)
        own = info.loss if isinstance(info, pj.StepInfo) else info.local_loss
        losses.append(jnp.asarray(own).mean())
    state, _ = train.drain(state)
    # The first losses of a pipeline are NaN, because nothing has arrived.
    parts = np.array_split([float(loss) for loss in losses][1:], 25)
    ended = task.test(jax.device_get(state.params))
    return {
        **{name: finite(value) for name, value in ended.items()},
        "losses": [finite(float(np.mean(part))) for part in parts],
    }


def make_step(
    loss: Any, tx: optax.GradientTransformation, run: Run
) -> pj.TrainStep | pj.LocalTrainStep:
    """Returns the step of the method of a run."""
    mesh, every, name = pj.data_mesh(GROUPS), run["sync_every"], run["codec"]
    all_reduce: collectives.AllReduce = collectives.psum()
    if name is not None:
        all_reduce = methods.fed_back(CODECS[name])
    if run["method"] == "pipeline":
        return pj.make_train_step(
            loss, tx, mesh=mesh, width=every, all_reduce=all_reduce
        )
    return pj.make_local_step(
        loss,
        tx,
        mesh=mesh,
        sync_every=every,
        overlap_steps=run["overlap_steps"],
        all_reduce=all_reduce,
    )


def known_as(task: str, optimizer: str, steps: int, method: Method) -> Run:
    """Returns what identifies runs of a method, but for their rate and seed."""
    return {"task": task, "optimizer": optimizer, "steps": steps, **method._asdict()}


def of_seeds(runs: list[Run], wanted: Run) -> list[Run]:
    """Returns the runs with these values, one for each seed."""
    return [run for run in runs if wanted.items() <= run.items()]


def change(runs: list[Run], base: list[Run]) -> str:
    """Returns the mean change of test loss over seeds, with its error.

    It is empty unless the runs have the seeds of `base`.
    """
    if {run["seed"] for run in runs} != {run["seed"] for run in base}:
        return ""
    if diverged(runs):
        return "diverged"
    return spread(differences(runs, base, "test_loss"), 3)
