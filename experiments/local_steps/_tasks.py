"""The tasks: those of `experiments.learning`, and nanoGPT's configuration for CPUs."""

import dataclasses
import pathlib

import optax

from experiments import learning
from experiments.convergence import OPTIMIZERS, Run, make_task, tuned_rate
from experiments.methods import TextProblem

NANOGPT = "nanogpt"
_BATCH = 12


def task_of(
    run: Run, *, text: pathlib.Path, data_dir: pathlib.Path | None
) -> learning.Task:
    """Returns the task of a run, with its number of steps."""
    if run["task"] != NANOGPT:
        return make_task(run["task"], text=text, data_dir=data_dir, steps=run["steps"])
    problem = TextProblem(text, batch_size=_BATCH, steps=run["steps"])

    def of(seed: int) -> TextProblem:
        return dataclasses.replace(problem, seed=seed)

    return learning.Task(
        steps=run["steps"],
        init=lambda seed: of(seed).start,
        loss=problem.loss,
        batches=lambda seed: of(seed).batches(0, 1),
        test=lambda params: {"test_loss": problem.test(params)},
    )


def rate_of(task: str, optimizer: str, tuning: list[Run]) -> float:
    """Returns the peak of the learning rate: what nanoGPT sets, or the tuned one."""
    if task == NANOGPT:
        return TextProblem.learning_rate
    return tuned_rate(task, optimizer, 0, tuning)


def optimizer_of(task: learning.Task, run: Run) -> optax.GradientTransformation:
    """Returns the inner optimizer of a run, with its schedule and clipping.

    Raises:
      ValueError: For nanoGPT's configuration with another optimizer than AdamW.
    """
    rate, name = run["rate"], run["optimizer"]
    if run["task"] != NANOGPT:
        return optax.chain(task.clip, OPTIMIZERS[name].make(task.schedule(rate)))
    if name != "adamw":
        raise ValueError(f"`optimizers` must be adamw for {NANOGPT}; got {name}.")
    return TextProblem(steps=task.steps, learning_rate=rate).optimizer
