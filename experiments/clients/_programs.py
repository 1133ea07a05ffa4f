"""The clients that are whole programs: Flax's examples, Flax NNX and Equinox."""

from . import _images, _modules, _tokens

PROGRAMS = {
    "MNIST (Flax): CNN": _images.mnist,
    "MNIST, gradient accumulation": _images.mnist_accumulated,
    "MNIST, gradient accumulation and dropout": _images.mnist_dropout,
    "ImageNet (Flax): ResNet, synchronised batch norm": _images.imagenet,
    "nlp_seq (Flax): tagger, token weights": _tokens.nlp_seq,
    "lm1b (Flax): language model, token weights": _tokens.lm1b,
    "Flax NNX, batch norm": _modules.flax_nnx,
    "Equinox, dropout": _modules.equinox,
}
