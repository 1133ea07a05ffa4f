"""Tests that the random codecs are unbiased, and that bias is found."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ..grid import each
from .bounds import bound
from .conformance import CODECS, EPS, VARIANTS, N, normal

DRAWS = 64  # for each of as many seeds: 4,096 in all
UNBIASED = [
    *("float32", "random_k 5", "random_k 0.1", "random_k 0.7"),
    *(name for name in CODECS if name.startswith("stochastic")),
]


def mean_is_off(name):
    """
    Returns where the mean of `decode(encode(x)) - x` is further from 0 than by chance.

    An error lies in [-b, b], where b is the bound. By Hoeffding's inequality, the mean
    of m errors exceeds t with probability at most `2 exp(-m t^2 / 2 b^2)`, whatever
    their distribution. t is chosen so that the probability over all elements of all
    codecs is 1e-6 (Bonferroni): one set of seeds in a million gives a false alarm, and
    the seeds are fixed.
    """
    codec, x = CODECS[name], normal(N)

    def step(state, _):
        payload, state = codec.encode(x, state)
        return state, codec.decode(payload, N)

    def draws(seed):
        return jax.lax.scan(step, codec.init(N, seed), length=DRAWS)[1]

    got = jax.jit(jax.vmap(draws))(jnp.arange(DRAWS, dtype=jnp.uint32))
    mean = np.asarray(got, np.float64).mean(axis=(0, 1))
    tests = N * len(UNBIASED)
    t = np.asarray(bound(codec, x)) * math.sqrt(2 * math.log(2 * tests / 1e-6)) / DRAWS
    return np.abs(mean - x) > t + 4 * EPS * np.abs(got).max(axis=(0, 1))


@pytest.mark.parametrize("name", each(UNBIASED, full=VARIANTS))
def test_mean_of_unbiased_codecs_equals_the_input(name):
    assert not mean_is_off(name).any()


@pytest.mark.parametrize("name", ["int4", "bf16", "truncate", "random_k 5, unscaled"])
def test_mean_of_biased_codecs_is_found_off(name):
    """t is 0.11 b, and a codec that always rounds in one direction errs by up to b."""
    assert name not in UNBIASED
    assert mean_is_off(name).mean() > 0.5
