"""Measures how a delay changes learning for nanoGPT's model of 10.6 million parameters.

Question: how much does each way to train with a delay lose for a real model, the more
replicas share a batch? The configuration is that of nanoGPT's `train_shakespeare_char`:
six layers of width 384, 64 sequences of 256 characters a batch, dropout of 0.2, AdamW
with a rate of 0.001. A run has 2,500 steps, and ends with its lowest validation loss,
which is measured every 250 steps on the whole split. nanoGPT documents 1.4697 after
5,000 steps.

Replicas are simulated on one device (`_simulated`).

Command: python -m experiments.replicas.nanogpt --text tinyshakespeare.txt
         It ends when `--minutes` are over, and goes on where it was when it is started
         again.
Time: written for one GPU, where each run should take a few minutes. Not run so far.
Result: experiments/results/replicas_nanogpt.json
"""

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import tyro

import pipejax as pj
from experiments import report
from experiments.convergence import found
from experiments.sharded import model, nanogpt

from ._methods import settings
from ._simulated import Simulated

CONFIG = dataclasses.replace(model.SIZES["10M"], vocabulary=65, dropout=0.2)
DOCUMENTED = 1.4697  # nanoGPT's README
METHODS = ("K=1", "K=2", "K=2, rank 8 at once", "K=2, plain")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the runs."""

    text: pathlib.Path
    """The text. Its first nine tenths are for training, and the rest for validation."""
    methods: tuple[str, ...] = METHODS
    """The names of the methods."""
    replicas: tuple[int, ...] = (16, 64)
    """The numbers of replicas, which divide the batch."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of parameters, batches and dropout."""
    steps: int = 2500
    """Number of steps of a run."""
    batch: int = 64
    """Number of sequences in a batch."""
    every: int = 250
    """Number of steps between two looks at the validation split."""
    sizes: model.Config = CONFIG
    """The sizes of the model."""
    minutes: float = 8.0
    """Time after which no other run begins."""
    out: pathlib.Path = report.RESULTS / "replicas_nanogpt.json"
    """The file of the result."""


def main(config: Config) -> list[dict[str, Any]]:
    """Runs what the result file lacks as long as there is time, and prints the runs."""
    start, splits = time.monotonic(), nanogpt.characters(config.text.read_text())
    cells = report.kept(config.out)
    for key in runs(config):
        if found(cells, key) or time.monotonic() - start > 60 * config.minutes:
            continue
        losses = trained(config, splits, key)
        cells.append({**key, **report.origin(), "losses": losses, "best": min(losses)})
        print(key, f"{min(losses):.4f}", flush=True)
        report.save(config.out, seed=key["seed"], documented=DOCUMENTED, cells=cells)
    return cells


def runs(config: Config) -> Iterator[dict[str, Any]]:
    """Yields what identifies each run; without prediction, one count is enough."""
    for seed, method in itertools.product(config.seeds, config.methods):
        predicts = method == "K=2"
        for replicas in config.replicas if predicts else config.replicas[:1]:
            yield {
                "method": method,
                "replicas": replicas,
                "seed": seed,
                "steps": config.steps,
            }


def trained(
    config: Config, splits: dict[str, np.ndarray], key: dict[str, Any]
) -> list[float]:
    """Returns the validation losses in the course of a run."""
    graph, params = model.init(config.sizes, key["seed"])
    train = pj.make_train_step(
        model.loss_with_dropout(graph),
        nanogpt.optimizer_of("adamw", config.steps),
        mesh=pj.data_mesh(1),
        executor="fused",
        **settings(key["method"], key["seed"], config.steps),
    )
    step = Simulated(train, key["replicas"])
    state = step.init(params, jax.random.key(key["seed"]))
    batches, losses = batches_of(config, splits["train"], key["seed"]), []
    test = jax.jit(model.loss_fn(graph))
    for _ in range(0, config.steps, config.every):
        state, _ = step.run(state, batches, config.every)
        # Parameters without what is in flight, as a user would evaluate them.
        now = state.common.trainable.params
        length = config.sizes.context
        losses.append(nanogpt.validation_loss(test, now, splits["validation"], length))
    return losses


def batches_of(config: Config, tokens: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    """Yields batches of sequences that begin anywhere."""
    rng, window = np.random.default_rng(seed), np.arange(config.sizes.context + 1)
    while True:
        starts = rng.integers(len(tokens) - config.sizes.context, size=config.batch)
        yield tokens[starts[:, None] + window]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
