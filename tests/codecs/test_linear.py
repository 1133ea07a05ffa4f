"""Tests linear codecs: the sum of payloads is the payload of the sum."""

import chex
import jax.numpy as jnp
import optax
import pytest

from ..grid import each
from ..helpers import assert_bits_equal
from .conformance import CODECS, EPS, VARIANTS, N, normal

LINEAR = [name for name, codec in CODECS.items() if codec.rounds]


@pytest.mark.parametrize("name", each(LINEAR, full=VARIANTS))
def test_sums_of_payloads_are_payloads_of_sums(name):
    codec, x, y = CODECS[name], normal(N, 1), normal(N, 2)
    state = codec.init(N, jnp.uint32(0))
    # Each product has at most 20 terms, none above 4 |M| |Q|, and two products are
    # added.
    close = {"rtol": 0, "atol": 64 * EPS * 4 * float(jnp.linalg.norm(x))}
    sizes = codec.round_sizes(N)
    assert codec.rounds == len(sizes)
    sums = ()
    for size in sizes:
        a, b, both = (
            codec.project(codec.leaves(v), state, sums) for v in (x, y, x + y)
        )
        chex.assert_shape([a, b], (size,))
        chex.assert_trees_all_close(a + b, both, **close)
        sums = (*sums, a + b)
    one, other, summed = (
        codec.rebuild(state, (*sums[:-1], v), N) for v in (a, b, sums[-1])
    )
    chex.assert_trees_all_close(optax.tree.add(one, other), summed, **close)


@pytest.mark.parametrize("name", each(LINEAR, full=VARIANTS))
def test_linear_sum_over_one_device_equals_its_encoding(name):
    codec, x = CODECS[name], normal(N)
    state, leaves = codec.init(N, jnp.uint32(0)), codec.leaves(x)
    sums = ()
    for _ in range(codec.rounds):
        sums = (*sums, codec.project(leaves, state, sums))
    payload, after = codec.encode(x, state)
    decoded = codec.leaves(codec.decode(payload, N))
    assert_bits_equal(codec.rebuild(state, sums, N), decoded)
    assert_bits_equal(codec.settled(leaves, state, sums, sums[-1]), after)
