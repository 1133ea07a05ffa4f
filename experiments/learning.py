"""Three small tasks that are really learned: digits, pictures, text.

- mnist: the MLP of 784-256-256-10, batches of 256
- cifar10: the CNN of 582,026 parameters, batches of 64; the data set is a JPEG copy
- shakespeare: a transformer of two layers and 410,368 parameters that predicts the next
  of 65 characters from up to 64; 1,024 predictions a batch; the last tenth is for
  tests. Gradients are clipped to norm 1, as usual for transformers: without that SGD
  with momentum ends anywhere between 1.9 and 2.3 nats, synchronous as it is, by seed

A tenth of the steps into it, the learning rate has risen to its peak; from there it
falls to 0 along half a cosine.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import data, models, transformer
from .task import make_test

Params = Any
Batch = Any


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learned, from what, and how well."""

    steps: int
    """Of a run."""
    init: Callable[[int], Params]
    """Parameters of a seed."""
    loss: Callable[[Params, Batch], jax.Array]
    """Mean cross entropy, in nats."""
    batches: Callable[[int], Iterator[Batch]]
    """Those of a seed, for ever."""
    test: Callable[[Params], dict[str, float]]
    """`test_loss` in nats and `test_accuracy`, on what was not learned from."""
    clip: optax.GradientTransformation = dataclasses.field(
        default_factory=optax.identity
    )
    """What gradients go through before an optimizer has them."""

    def schedule(self, peak: float) -> optax.Schedule:
        """Of the learning rate, over a run."""
        rise = max(1, self.steps // 10)
        return optax.warmup_cosine_decay_schedule(0.0, peak, rise, self.steps)


def classifier(
    model: str, dataset: data.Dataset, *, batch_size: int, steps: int
) -> Task:
    """Images, by a model of `experiments.models`."""
    net = models.build(model, num_classes=dataset.num_classes)

    def init(seed: int) -> Params:
        image = jnp.zeros((1, *dataset.image_shape))
        return net.init(jax.random.key(seed), image, train=False)["params"]

    def loss(params: Params, batch: Batch) -> jax.Array:
        logits: Any = net.apply({"params": params}, batch["image"], train=True)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["label"]
        ).mean()

    measured = make_test(net)

    def test(params: Params) -> dict[str, float]:
        return measured(params, data.test_batches(dataset, batch_size=500))

    batches = functools.partial(_images, dataset, batch_size)
    return Task(steps, init, loss, batches, test)


def _images(dataset: data.Dataset, batch_size: int, seed: int) -> Iterator[Batch]:
    return data.train_batches(dataset, batch_size=batch_size, seed=seed)


def characters(path: pathlib.Path, *, batch_size: int, steps: int) -> Task:
    """Plain text, a character a token, by `experiments.transformer`.

    Raises:
      FileNotFoundError: if there is no such file.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"no text at {path}: fetch Karpathy's tinyshakespeare (1.1 MB), or any"
            " plain text, and say where it is, or leave this task out"
        )
    letters, tokens = np.unique(list(path.read_text()), return_inverse=True)
    tokens = tokens.astype(np.int32)
    config = transformer.Config(
        layers=2, features=128, heads=4, vocabulary=len(letters), context=64
    )
    loss = transformer.loss_fn(config)
    split = len(tokens) * 9 // 10
    window = np.arange(config.context + 1)

    def batches(seed: int) -> Iterator[Batch]:
        rng = np.random.RandomState(seed)
        while True:
            starts = rng.randint(split - config.context, size=batch_size)
            yield tokens[starts[:, None] + window]

    starts = np.arange(split, len(tokens) - config.context - 1, config.context)
    held_out = tokens[starts[:, None] + window]
    measures = {
        "test_loss": jax.jit(loss),
        "test_accuracy": jax.jit(transformer.accuracy_fn(config)),
    }

    def test(params: Params) -> dict[str, float]:
        parts = np.array_split(held_out, max(1, len(held_out) // 128))
        shares = np.array([len(part) / len(held_out) for part in parts])
        return {
            name: float(shares @ [float(measure(params, part)) for part in parts])
            for name, measure in measures.items()
        }

    def init(seed: int) -> Params:
        return transformer.init(jax.random.key(seed), config)

    return Task(steps, init, loss, batches, test, optax.clip_by_global_norm(1.0))
