"""The problem: a classifier of images, with the same start for all ways to train."""

import dataclasses
import functools
import math
import pathlib
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from experiments import data, models

from ._method import Batch, flags

Model = Literal["softmax", "mlp", "wide_mlp", "cnn", "alexnet", "resnet18"]
Images = Literal["digits", "mnist", "cifar10", "cifar100", "imagenet2012"]


class _Form(NamedTuple):
    """The shape of an image and the number of classes, which give a model its form."""

    image: tuple[int, int, int]
    classes: int


_FORMS = {
    "digits": _Form((8, 8, 1), 10),
    "mnist": _Form((28, 28, 1), 10),
    "cifar10": _Form((32, 32, 3), 10),
    "cifar100": _Form((32, 32, 3), 100),
    "imagenet2012": _Form((224, 224, 3), 1000),
}
_USUAL: dict[str, Images] = {
    "softmax": "cifar100",
    "mlp": "mnist",
    "wide_mlp": "mnist",
    "cnn": "cifar10",
    "alexnet": "imagenet2012",
    "resnet18": "cifar10",
}


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
    """The data set that sets image size and classes; by default that of the paper."""

    @property
    def dataset(self) -> Images:
        """Returns the name of the data set."""
        return self.images or _USUAL[self.model]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Returns height, width and channels of an image."""
        return _FORMS[self.dataset].image

    @property
    def classes(self) -> int:
        """Returns the number of classes."""
        return _FORMS[self.dataset].classes

    @functools.cached_property
    def net(self) -> nn.Module:
        """Returns the Flax module of the model."""
        return models.build(self.model, num_classes=self.classes)

    def flags(self, prefix: str = "--problem.") -> list[str]:
        """Returns the flags of this problem for the command line of another program."""
        return flags(self, prefix)

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
        labels = rng.integers(self.classes, size=self.batch_size)
        return {"image": images.astype(np.float32), "label": labels.astype(np.int32)}

    def real_batch(self, host: int, data_dir: pathlib.Path) -> Batch:
        """Returns a batch of the data set that TFDS has prepared in `data_dir`.

        Raises:
          DatasetNotFoundError: If the data set is not there.
        """
        dataset = data.load(self.dataset, data_dir=data_dir)
        first = host * self.batch_size
        images, labels = dataset.train.read(np.arange(first, first + self.batch_size))
        return {"image": data.normalise(images, dataset), "label": labels}
