"""The clients that are whole programs."""

from collections.abc import Callable

from . import _gan, _images, _mean_teacher, _modules, _pinn, _td3, _tokens
from ._client import Client, Program

PROGRAMS: dict[str, Callable[[int], Client | Program]] = {
    "MNIST (Flax): CNN": _images.mnist,
    "MNIST, gradient accumulation": _images.mnist_accumulated,
    "MNIST, gradient accumulation and dropout": _images.mnist_dropout,
    "ImageNet (Flax): ResNet, synchronised batch norm": _images.imagenet,
    "nlp_seq (Flax): tagger, token weights": _tokens.nlp_seq,
    "lm1b (Flax): language model, token weights": _tokens.lm1b,
    "Flax NNX, batch norm": _modules.flax_nnx,
    "Equinox, dropout": _modules.equinox,
    "GAN: generator and discriminator": _gan.gan,
    "TD3: target networks, delayed policy": _td3.td3,
    "Mean teacher: distillation": _mean_teacher.mean_teacher,
    "PINN: Burgers' equation, weighted losses": _pinn.pinn,
}
