"""Provides optimizers as functions of a learning rate."""

import functools

import optax

sgd = optax.sgd
heavy_ball = functools.partial(optax.sgd, momentum=0.9)
gentle = functools.partial(optax.sgd, momentum=0.5)
nesterov = functools.partial(optax.sgd, momentum=0.9, nesterov=True)


def averaged(rate, momentum=0.9):
    return optax.chain(optax.ema(momentum, debias=True), optax.scale(-rate))


def decayed(rate):
    return optax.chain(optax.add_decayed_weights(0.5), optax.sgd(rate))


FAMILIES = {
    "sgd": sgd,
    "momentum 0.5": gentle,
    "momentum 0.9": heavy_ball,
    "nesterov": nesterov,
    "average": averaged,
}
