"""The tasks by name, with their numbers of steps."""

import dataclasses
import math
import pathlib

from experiments import data, learning

TASKS = ("mnist", "cifar10", "shakespeare")


def blind_guess(name: str) -> float:
    """Returns the loss, in nats, of a uniform guess: 65 characters or 10 classes."""
    return math.log(65 if name == "shakespeare" else 10)


def make_task(
    name: str, *, text: pathlib.Path, data_dir: pathlib.Path | None, steps: int | None
) -> learning.Task:
    """Makes a task of `experiments.learning`; `steps` replaces its number of steps."""
    if name == "shakespeare":
        task = learning.characters(text, batch_size=16, steps=2000)
    elif name == "cifar10":
        dataset = data.load("cifar10_jpeg", data_dir=data_dir)
        task = learning.classifier("cnn", dataset, batch_size=64, steps=1500)
    else:
        dataset = data.load(name, data_dir=data_dir)
        task = learning.classifier("mlp", dataset, batch_size=256, steps=1500)
    return dataclasses.replace(task, steps=steps or task.steps)
