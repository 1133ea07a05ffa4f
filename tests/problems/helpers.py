"""Provides the data that the tests of problems share."""

import jax
import jax.numpy as jnp
import numpy as np

N, D = 60, 4


def features(seed=0):
    return np.random.default_rng(seed).normal(size=(N, D))


def targets(seed=1):
    rng = np.random.default_rng(seed)
    return features() @ rng.normal(size=D) + rng.normal(size=N)


def signs():
    return np.where(targets() > 0, 1, -1)


def labels():
    return np.random.default_rng(2).integers(0, 3, N)


def in_float64(function, *args):
    with jax.enable_x64(True):
        return np.asarray(function(*jax.tree.map(jnp.asarray, args)))
