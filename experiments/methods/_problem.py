"""The problem: a classifier of images, with the same start for all ways to train."""

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
    """A model, its images, and AdamW as the optimizer."""

    model: Model = "wide_mlp"
    """The model of `experiments.models`; wide_mlp has 16 MB of gradients."""
    batch_size: int = 64
    """The number of examples of each host in a step."""
    learning_rate: float = 1e-3
    """The learning rate of AdamW at the start."""
    steps: int | None = None
    """The steps in which the rate falls to 0 along half a cosine; default: constant."""
    weight_decay: float = 1e-4
    """The decoupled weight decay of AdamW."""
    warmup: int = 0
    """The number of synchronous steps with which Pipe-SGD begins."""
    seed: int = 0
    """The seed of the parameters and the order of the data."""
    images: Images | None = None
    """The data set that sets the image size; default: mnist for MLPs, else cifar10."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Returns height, width and channels of an image."""
        default = "mnist" if self.model.endswith("mlp") else "cifar10"
        return _SHAPES[self.images or default]

    @functools.cached_property
    def net(self) -> nn.Module:
        """Returns the Flax module of the model."""
        return models.build(self.model, num_classes=10)

    def flags(self, prefix: str = "--problem.") -> list[str]:
        """Returns the flags of this problem for the command line of another program."""
        return [
            argument
            for name, value in dataclasses.asdict(self).items()
            for argument in (prefix + name.replace("_", "-"), str(value))
        ]

    @functools.cached_property
    def start(self) -> Any:
        """Returns the parameters at the start, in the memory of the host."""
        return jax.device_get(jax.jit(self._init)())

    def _init(self) -> Any:
        image = jnp.zeros((1, *self.image_shape))
        return self.net.init(jax.random.key(self.seed), image, train=False)["params"]

    @property
    def elements(self) -> int:
        """Returns the number of parameters."""
        shapes = jax.tree.leaves(jax.eval_shape(self._init))
        return sum(math.prod(leaf.shape) for leaf in shapes)

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Returns the mean cross entropy over the examples."""
        logits: Any = self.net.apply({"params": params}, batch["image"], train=True)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["label"]
        ).mean()

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Returns AdamW, with a schedule if `steps` is given."""
        rate: optax.ScalarOrSchedule = self.learning_rate
        if self.steps is not None:
            rate = optax.cosine_decay_schedule(rate, self.steps)
        return optax.adamw(rate, weight_decay=self.weight_decay)

    def random_batch(self, host: int) -> Batch:
        """Returns a batch of random images and labels, for timing."""
        rng = np.random.default_rng((self.seed, host))
        images = rng.normal(size=(self.batch_size, *self.image_shape))
        labels = rng.integers(10, size=self.batch_size)
        return {"image": images.astype(np.float32), "label": labels.astype(np.int32)}
