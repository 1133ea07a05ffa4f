"""Three small tasks with real data: handwritten digits, photographs and text.

- mnist: the MLP of 784-256-256-10, with batches of 256 images.
- cifar10: the CNN of 582,026 parameters, with batches of 64 images. The data set is a
  JPEG copy of CIFAR-10.
- shakespeare: a transformer of two layers and 410,368 parameters, which predicts the
  next of 65 characters from up to 64 characters before it. A batch has 1,024
  predictions. The last tenth of the text is the test set. Gradients are clipped to norm
  1, as is usual for transformers. Without clipping, SGD with momentum ends anywhere
  between 1.9 and 2.3 nats, depending on the seed, even in synchronous training.

The learning rate rises to its peak during the first tenth of the steps, and then falls
to 0 along half a cosine.
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
    """A model, the data that it learns from, and a test of how well it learns."""

    steps: int
    """Number of steps of a run."""
    init: Callable[[int], Params]
    """Returns the first parameters for a seed."""
    loss: Callable[[Params, Batch], jax.Array]
    """Returns the mean cross entropy of a batch, in nats."""
    batches: Callable[[int], Iterator[Batch]]
    """Returns an endless iterator over the batches for a seed."""
    test: Callable[[Params], dict[str, float]]
    """Returns `test_loss` in nats and `test_accuracy`, on held-out examples."""
    clip: optax.GradientTransformation = dataclasses.field(
        default_factory=optax.identity
    )
    """Transformation of the gradients that comes before the optimizer."""

    def schedule(self, peak: float) -> optax.Schedule:
        """Returns the schedule of the learning rate over a run, with this peak."""
        rise = max(1, self.steps // 10)
        return optax.warmup_cosine_decay_schedule(0.0, peak, rise, self.steps)


def classifier(
    model: str, dataset: data.Dataset, *, batch_size: int, steps: int
) -> Task:
    """Makes a task that classifies images with a model of `experiments.models`."""
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
    """Makes a task that predicts text with the model of `experiments.transformer`.

    Each character of the text is a token.

    Args:
      path: The text file.
      batch_size: The number of sequences in a batch.
      steps: The number of steps of a run.

    Raises:
      FileNotFoundError: If the text file does not exist.
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
