"""The problem: the next character of a text, as nanoGPT predicts it on CPUs."""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments import transformer

from ._method import Batch, flags


class Splits(NamedTuple):
    """A text as numbers of its characters.

    Attributes:
      train: The first nine tenths.
      validation: The rest, in windows of one more than the context, `[n, T + 1]`.
      vocabulary: The number of different characters.
    """

    train: np.ndarray
    validation: np.ndarray
    vocabulary: int


@dataclasses.dataclass(frozen=True)
class TextProblem:
    """A text, a transformer of nanoGPT's sizes for CPUs, and AdamW as it sets it.

    These are 4 layers of 4 heads and width 128, 12 sequences of 64 characters in a
    step, a rate that rises for 100 steps and falls as a cosine to a tenth, and
    gradients of norm 1 at most (https://github.com/karpathy/nanoGPT).
    """

    text: pathlib.Path = pathlib.Path("tinyshakespeare.txt")
    """The text."""
    batch_size: int = 3
    """The number of sequences of each host in a step."""
    steps: int = 2000
    """The number of steps of a run."""
    learning_rate: float = 1e-3
    """The greatest learning rate of AdamW."""
    weight_decay: float = 0.1
    """The decoupled weight decay of matrices."""
    b2: float = 0.99
    """The decay of AdamW's second moment."""
    clip: float = 1.0
    """The norm to which gradients are clipped."""
    warmup: int = 0
    """The number of synchronous steps with which a pipeline begins."""
    context: int = 64
    """The number of characters from which the next one is predicted."""
    layers: int = 4
    """The number of layers."""
    seed: int = 0
    """The seed of the parameters and the order of the data."""

    @functools.cached_property
    def splits(self) -> Splits:
        """Returns the text as numbers."""
        letters, tokens = np.unique(list(self.text.read_text()), return_inverse=True)
        tokens = tokens.astype(np.int32)
        end, length = len(tokens) * 9 // 10, self.context
        held_out = tokens[end:]
        starts = np.arange(0, len(held_out) - length, length)
        windows = held_out[starts[:, None] + np.arange(length + 1)]
        return Splits(tokens[:end], windows, len(letters))

    @property
    def config(self) -> transformer.Config:
        """Returns the sizes of the transformer."""
        return transformer.Config(
            layers=self.layers,
            features=128,
            heads=4,
            vocabulary=self.splits.vocabulary,
            context=self.context,
        )

    @functools.cached_property
    def start(self) -> Any:
        """Returns the parameters at the start, in the memory of the host."""
        return jax.device_get(jax.jit(self._init)())

    def flags(self, prefix: str = "--problem.") -> list[str]:
        """Returns the flags of this problem for the command line of another program."""
        return flags(self, prefix)

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Returns the mean cross entropy over all characters, in nats."""
        return transformer.loss_fn(self.config)(params, batch["tokens"])

    @property
    def schedule(self) -> optax.Schedule:
        """Returns the learning rate over the steps."""
        peak, rise = self.learning_rate, min(100, self.steps // 2)
        return optax.warmup_cosine_decay_schedule(
            0.0, peak, rise, self.steps, peak / 10
        )

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Returns AdamW, which clips gradients and decays matrices."""
        adamw = optax.adamw(
            self.schedule,
            b2=self.b2,
            weight_decay=self.weight_decay,
            mask=functools.partial(jax.tree.map, lambda x: x.ndim > 1),
        )
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw)

    def batches(self, host: int, hosts: int) -> Iterator[Batch]:
        """Returns an endless iterator over a host's share of the batches."""
        rng, train = np.random.default_rng(self.seed), self.splits.train
        own = slice(host * self.batch_size, (host + 1) * self.batch_size)
        window = np.arange(self.context + 1)
        while True:
            count = len(train) - self.context
            starts = rng.integers(count, size=hosts * self.batch_size)
            yield {"tokens": train[starts[own, None] + window]}

    def random_batch(self, host: int) -> Batch:
        """Returns a batch for timing."""
        return next(self.batches(host, host + 1))

    def test(self, params: Any) -> float:
        """Returns the loss on the whole validation split, in nats."""
        windows = self.splits.validation
        parts = np.array_split(windows, max(1, len(windows) // 64))
        losses = [float(self._test(params, {"tokens": part})) for part in parts]
        return float(np.average(losses, weights=[len(part) for part in parts]))

    @functools.cached_property
    def _test(self) -> jax.stages.Wrapped:
        return jax.jit(self.loss)

    def _init(self) -> Any:
        return transformer.init(jax.random.key(self.seed), self.config)
