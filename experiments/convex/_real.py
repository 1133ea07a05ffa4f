"""Trains softmax regression on real images: the paper's convex experiment.

The paper trained a linear classifier on CIFAR-100. This experiment uses digits, MNIST
and CIFAR-10, with features for which the optimum is known. The features are the pixels
and a constant 1. MNIST's pixels are means of 2 x 2 pixels, and CIFAR-10's are means of
4 x 4 pixels.
"""

import pathlib
from typing import Any

import numpy as np
import optax

import pipejax as pj
from experiments import data
from pipejax import problems

from ._codecs import DEVICES
from ._run import epochs, path

POOLED = {"digits": 1, "mnist": 2, "cifar10_jpeg": 4}
L2 = 1e-3
EXAMPLES = 10_000  # at most, of a data set


def softmax(name: str, data_dir: pathlib.Path | None) -> problems.Problem:
    """Makes the problem of softmax regression on the first images of a data set."""
    dataset = data.load(name, data_dir=data_dir)
    rows = np.arange(min(EXAMPLES, len(dataset.train)))
    images, labels = dataset.train.read(rows)
    images = pooled(data.normalise(images, dataset), POOLED[name])
    flat = images.reshape(len(rows), -1).astype(np.float64)
    x = np.concatenate([flat, np.ones((len(rows), 1))], axis=1)
    return problems.softmax(x / np.sqrt(x.shape[1]), labels, l2=L2)


def pooled(images: np.ndarray, by: int) -> np.ndarray:
    """Returns the means over `by` x `by` pixels of images [n, H, W, channels]."""
    n, height, width, channels = images.shape
    squares = images.reshape(n, height // by, by, width // by, by, channels)
    return squares.mean(axis=(2, 4))


def excess(
    problem: problems.Problem,
    widths: tuple[int, ...],
    times: np.ndarray,
    seeds: tuple[int, ...],
) -> dict[str, Any]:
    """Returns `F(w) - F(w*)` at each of `times`, a row for each width.

    SGD runs at a quarter of the largest learning rate at which the largest width is
    stable, on batches of 64 examples.
    """
    rate = 0.25 * pj.stability.max_learning_rate(
        optax.sgd,
        max(widths),
        curvature=problem.smoothness,
        weight_prediction=False,
    )
    rows: dict[str, Any] = {}
    for width in widths:
        ends = []
        for seed in seeds:
            batches = epochs(problem, int(times[-1]), 64, seed)
            settings = {"mesh": pj.data_mesh(DEVICES)}
            run = path(problem, optax.sgd(rate), width, batches, **settings)
            ends.append([problem.excess(run[time - 1]) for time in times])
        rows[str(width)] = np.mean(ends, axis=0).tolist()
    return rows
