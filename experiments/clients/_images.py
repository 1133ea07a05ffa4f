"""Small versions of Flax's image examples: MNIST, and ImageNet's residual network."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from ._client import Client, Extra, Loss

STEPS, BATCH, SIDE, CLASSES = 6, 16, 4, 4


class CNN(nn.Module):
    """A convolution, pooling, and a hidden layer, which dropout may follow."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits [B, classes] of images [B, side, side, channels]."""
        x = nn.avg_pool(nn.relu(nn.Conv(4, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(16)(x.reshape(len(x), -1)))
        x = nn.Dropout(self.dropout, deterministic=not self.dropout)(x)
        return nn.Dense(CLASSES)(x)


class ResNet(nn.Module):
    """A stem and two residual blocks with batch norm, the second at half the size.

    All activations are smooth. After batch norm, many inputs of a ReLU would lie next
    to its kink, and rounding could move them to one side of the kink in one program and
    to the other side in another program.

    Batch norm takes its statistics over the images of all devices along `axis_name`. If
    `axis_name` is `None`, it takes them over the images that the model is given.
    """

    axis_name: str | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits [B, classes] of images [B, side, side, channels]."""
        norm = functools.partial(
            nn.BatchNorm,
            use_running_average=False,
            momentum=0.9,
            axis_name=self.axis_name,
        )

        def conv(features: int, size: int, stride: int = 1) -> nn.Conv:
            return nn.Conv(features, (size, size), (stride, stride), use_bias=False)

        x = nn.swish(norm()(conv(4, 3)(x)))
        for features, stride in ((4, 1), (8, 2)):
            y = nn.swish(norm()(conv(features, 3, stride)(x)))
            y = norm()(conv(features, 3)(y))
            if x.shape != y.shape:
                x = norm()(conv(features, 1, stride)(x))
            x = nn.swish(x + y)
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


def mnist(seed: int) -> Client:
    """Makes the client that trains the CNN by SGD with momentum."""
    return _classifier(CNN(), seed, channels=1)


def mnist_accumulated(seed: int) -> Client:
    """Makes the client of `mnist` with two microbatches for each device."""
    return _classifier(CNN(), seed, channels=1, settings={"microbatches": 2})


def mnist_dropout(seed: int) -> Client:
    """Makes the client of `mnist_accumulated` with dropout.

    Every microbatch of every device draws its dropout mask from a key of its own.
    """
    return _classifier(
        CNN(dropout=0.5),
        seed,
        channels=1,
        whole=None,
        rng=jax.random.key(seed + 1),
        settings={"microbatches": 2},
    )


def imagenet(seed: int) -> Client:
    """Makes the client that trains the residual network, with batch norm over devices.

    Batch norm over devices needs the fused executor. As in the original, weight decay
    adds half the sum of the squared weights, times 1e-4, to the loss. The optimizer is
    SGD with Nesterov momentum, at a learning rate that warms up and then falls along a
    cosine.
    """
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, STEPS)
    images = _images(seed, channels=3)
    variables = ResNet(None).init(jax.random.key(seed), images[0]["image"])
    return Client(
        loss=_normalised(ResNet("data")),
        whole=_normalised(ResNet(None)),
        tx=optax.sgd(rate, momentum=0.9, nesterov=True),
        params=variables["params"],
        model_state=variables["batch_stats"],
        batches=images,
        # Statistics and kernel gradients are sums over images and positions.
        terms=BATCH * SIDE**2,
        settings={"executor": "fused"},
    )


def _classifier(model: nn.Module, seed: int, channels: int, **fields: Any) -> Client:
    images = _images(seed, channels)
    variables = CNN().init(jax.random.key(seed), images[0]["image"])
    loss = _cross_entropy(model)
    return Client(
        **{
            "loss": loss,
            "whole": loss,
            "tx": optax.sgd(0.1, momentum=0.9),
            "params": variables["params"],
            "batches": images,
            # The gradient of a kernel is a sum over images and positions.
            "terms": BATCH * SIDE**2,
        }
        | fields
    )


def _cross_entropy(model: nn.Module) -> Loss:
    def loss(params: Any, batch: Any, *, rng: Any = None) -> tuple[jax.Array, Extra]:
        rngs = None if rng is None else {"dropout": rng}
        logits: Any = model.apply({"params": params}, batch["image"], rngs=rngs)
        return _losses(logits, batch).mean(), Extra(_accuracy(logits, batch))

    return loss


def _normalised(model: nn.Module) -> Loss:
    def loss(params: Any, batch: Any, *, model_state: Any) -> tuple[jax.Array, Extra]:
        logits, after = model.apply(
            {"params": params, "batch_stats": model_state},
            batch["image"],
            mutable=["batch_stats"],
        )
        squares = [jnp.sum(w**2) for w in jax.tree.leaves(params) if w.ndim > 1]
        loss = _losses(logits, batch).mean() + 1e-4 / 2 * sum(squares)
        extra = Extra(_accuracy(logits, batch), after["batch_stats"])
        return loss, extra

    return loss


def _losses(logits: jax.Array, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def _accuracy(logits: jax.Array, batch: Any) -> dict[str, jax.Array]:
    return {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


def _images(seed: int, channels: int) -> list[Any]:
    """Returns batches of noise that is brighter in the quarter that the label names."""
    rng = np.random.default_rng(seed)
    half = SIDE // 2

    def batch() -> dict[str, Any]:
        labels = rng.integers(CLASSES, size=BATCH).astype(np.int32)
        images = rng.normal(size=(BATCH, SIDE, SIDE, channels))
        for image, label in zip(images, labels, strict=True):
            top, left = half * (label // 2), half * (label % 2)
            image[top : top + half, left : left + half] += 0.5
        return {"image": images.astype(np.float32), "label": labels}

    return [batch() for _ in range(STEPS)]
