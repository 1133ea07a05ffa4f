"""What is to be learned: a classifier of images, from the same start for everyone."""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from experiments import models

from ._method import Batch

Model = Literal["mlp", "wide_mlp", "cnn", "resnet18"]
Images = Literal["digits", "mnist", "cifar10"]
_SHAPES = {"digits": (8, 8, 1), "mnist": (28, 28, 1), "cifar10": (32, 32, 3)}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model, its images, and AdamW."""

    model: Model = "wide_mlp"
    """Of `experiments.models`; wide_mlp has 16 MB of gradients."""
    batch_size: int = 64
    """Examples of each host in a step."""
    learning_rate: float = 1e-3
    """Of AdamW, at the start."""
    steps: int | None = None
    """In which it falls to 0 along half a cosine; by default it stays."""
    weight_decay: float = 1e-4
    """Decoupled."""
    warmup: int = 0
    """Steps with which Pipe-SGD begins, synchronously."""
    seed: int = 0
    """Of the parameters and the order of the data."""
    images: Images | None = None
    """Whose size they have; by default MNIST's for the MLPs, CIFAR-10's for others."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        default = "mnist" if self.model.endswith("mlp") else "cifar10"
        return _SHAPES[self.images or default]

    @functools.cached_property
    def net(self) -> nn.Module:
        """The Flax module."""
        return models.build(self.model, num_classes=10)

    def flags(self, prefix: str = "--problem.") -> list[str]:
        """For a command line that has a problem."""
        return [
            argument
            for name, value in dataclasses.asdict(self).items()
            for argument in (prefix + name.replace("_", "-"), str(value))
        ]

    @functools.cached_property
    def start(self) -> Any:
        """The parameters at the start, in the host's memory."""
        return jax.device_get(jax.jit(self._init)())

    def _init(self) -> Any:
        image = jnp.zeros((1, *self.image_shape))
        return self.net.init(jax.random.key(self.seed), image, train=False)["params"]

    @property
    def elements(self) -> int:
        """Parameters."""
        shapes = jax.tree.leaves(jax.eval_shape(self._init))
        return sum(math.prod(leaf.shape) for leaf in shapes)

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Cross entropy, a mean over the examples."""
        logits: Any = self.net.apply({"params": params}, batch["image"], train=True)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["label"]
        ).mean()

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """AdamW."""
        rate: optax.ScalarOrSchedule = self.learning_rate
        if self.steps is not None:
            rate = optax.cosine_decay_schedule(rate, self.steps)
        return optax.adamw(rate, weight_decay=self.weight_decay)

    def random_batch(self, host: int) -> Batch:
        """A batch in which there is nothing to learn, for a clock."""
        rng = np.random.default_rng((self.seed, host))
        images = rng.normal(size=(self.batch_size, *self.image_shape))
        labels = rng.integers(10, size=self.batch_size)
        return {"image": images.astype(np.float32), "label": labels.astype(np.int32)}
