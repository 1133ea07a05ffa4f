"""Flax image classifiers and their registry, `MODELS`.

All models map images [B, H, W, C] to logits [B, num_classes] with
`model.apply(variables, images, train=...)`. Images may have any size, which `init`
learns from the images that it is given. Only `resnet18` with `norm="batch"` has state,
which is `batch_stats`. A model with dropout needs `rngs={"dropout": key}` in training.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

# He et al. 2015: keeps the variance of gradients in the backward pass through ReLUs.
_he_init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


class MLP(nn.Module):
    """MLP with ReLU layers of `hidden` units, by default 784-256-256-10 on MNIST."""

    num_classes: int
    hidden: Sequence[int] = (256, 256)
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns the logits [B, num_classes] of images [B, H, W, C]."""
        x = x.reshape(x.shape[0], -1)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)


class CNN(nn.Module):
    """CNN with three 3 x 3 convolutions, two poolings and one hidden layer.

    For images of 32 x 32 x 3 and 10 classes it has 582,026 parameters, which make 2.3
    MB of float32 gradients. Nine tenths of the parameters are in the hidden layer.
    Images must be 4 x 4 or larger.
    """

    num_classes: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns the logits [B, num_classes] of images [B, H, W, C]."""
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(64, (3, 3))(x))
        x = nn.relu(nn.Conv(64, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)


class AlexNet(nn.Module):
    """AlexNet in one column (Krizhevsky 2014, https://arxiv.org/abs/1404.5997).

    For images of 224 x 224 x 3 and 1,000 classes it has 61,100,840 parameters, as in
    PyTorch, which make 244 MB of float32 gradients. All but 4 % of the parameters are
    in the three dense layers, so that the model has much to exchange for its compute.
    Images must be 63 x 63 or larger.
    """

    num_classes: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns the logits [B, num_classes] of images [B, H, W, C]."""
        x = nn.relu(nn.Conv(64, (11, 11), 4, padding=2)(x))
        x = nn.max_pool(x, (3, 3), (2, 2))
        x = nn.relu(nn.Conv(192, (5, 5))(x))
        x = nn.max_pool(x, (3, 3), (2, 2))
        for features in (384, 256, 256):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
        x = nn.max_pool(x, (3, 3), (2, 2))
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
            x = nn.relu(nn.Dense(4096)(x))
        return nn.Dense(self.num_classes)(x)


def _group_norm(train: bool) -> Callable[..., nn.Module]:
    del train  # group norm is the same in training and in test
    return functools.partial(nn.GroupNorm, num_groups=32, epsilon=1e-5)


def _batch_norm(train: bool) -> Callable[..., nn.Module]:
    return functools.partial(
        nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5
    )


_NORMS = {"group": _group_norm, "batch": _batch_norm}


def _conv(features: int, size: int, stride: int) -> nn.Conv:
    # Padding as in the paper and PyTorch: "SAME" is asymmetric at stride 2.
    window, padding = (size, size), size // 2
    return nn.Conv(
        features, window, stride, padding, use_bias=False, kernel_init=_he_init
    )


class BasicBlock(nn.Module):
    """Basic block `relu(shortcut(x) + branch(x))` of He et al. 2016 (v1).

    The branch ends in a norm whose scale starts at 0, so that the block starts as
    `relu(shortcut(x))` (Goyal et al. 2017). The shortcut is `x` itself, or a 1 x 1
    convolution and a norm where the shape changes.
    """

    features: int
    stride: int
    norm: str

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns [B, H / stride, W / stride, features] for x [B, H, W, C]."""
        norm = _NORMS[self.norm](train)
        branch = nn.relu(norm()(_conv(self.features, 3, self.stride)(x)))
        branch = _conv(self.features, 3, 1)(branch)
        branch = norm(scale_init=nn.initializers.zeros)(branch)
        if x.shape != branch.shape:
            x = norm()(_conv(self.features, 1, self.stride)(x))
        return nn.relu(x + branch)


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016, https://arxiv.org/abs/1512.03385).

    Images with sides of up to 64 pixels get the stem for CIFAR (3 x 3, stride 1).
    Larger images get the stem for ImageNet (7 x 7, stride 2, max-pool). With either
    norm, the model has as many parameters as in PyTorch: 11,173,962 for CIFAR-10 and
    11,689,512 for ImageNet.

    `norm="batch"` normalises by the statistics of the images that it is given. In
    data-parallel training, these are the images of one device. `norm="group"` (32
    groups) has no state and treats each image alone, so that the result does not depend
    on the number of devices.
    """

    num_classes: int
    norm: str = "group"

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns the logits [B, num_classes] of images [B, H, W, C]."""
        norm = _NORMS[self.norm](train)
        small = max(x.shape[1:3]) <= 64
        x = _conv(64, 3, 1)(x) if small else _conv(64, 7, 2)(x)
        x = nn.relu(norm()(x))
        if not small:
            x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for stage, features in enumerate((64, 128, 256, 512)):
            for stride in (1 if stage == 0 else 2, 1):
                x = BasicBlock(features, stride, self.norm)(x, train)
        return nn.Dense(self.num_classes)(jnp.mean(x, axis=(1, 2)))


MODELS: dict[str, Callable[..., nn.Module]] = {
    # Linear in its parameters, so that its cross entropy is convex.
    "softmax": functools.partial(MLP, hidden=()),
    "mlp": MLP,
    # 4,093,450 parameters on MNIST: 16 MB of gradients, which are computed quickly.
    "wide_mlp": functools.partial(MLP, hidden=(1664, 1664)),
    "cnn": CNN,
    "alexnet": AlexNet,
    "resnet18": ResNet18,
}


def build(
    name: str, *, num_classes: int, norm: str = "group", dropout: float = 0.0
) -> nn.Module:
    """Makes a model by name.

    Args:
      name: A key of `MODELS`.
      num_classes: The number of logits, at least 1.
      norm: The norm of `resnet18`, "group" or "batch". The other models have no norm
        layers and take only "group".
      dropout: The dropout rate in [0, 1). `resnet18` has no dropout and takes only 0.

    Raises:
      ValueError: If an argument breaks one of these rules.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; choose from {', '.join(MODELS)}")
    if norm not in _NORMS:
        raise ValueError(f"unknown `norm` {norm!r}; choose from {', '.join(_NORMS)}")
    if num_classes < 1:
        raise ValueError(
            f"`num_classes` must be positive; got {num_classes}; "
            "pass the data set's num_classes"
        )
    if not 0 <= dropout < 1:
        raise ValueError(
            f"`dropout` must lie in [0, 1); got {dropout}; use 0.0 for none"
        )
    if name == "resnet18":
        if dropout:
            raise ValueError(
                f"resnet18 has no dropout; got `dropout` {dropout}; use 0.0"
            )
        return ResNet18(num_classes, norm)
    if norm == "batch":
        raise ValueError(
            f"{name} has no norm layers; got `norm` 'batch'; leave it at 'group'"
        )
    return MODELS[name](num_classes=num_classes, dropout=dropout)
