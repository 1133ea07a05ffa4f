"""Tests linear codecs: the sum of payloads is the payload of the sum."""

import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from ..collectives.reference import EXACT_BITS
from ..grid import each
from ..helpers import assert_bits_equal
from .conformance import CODECS, EPS, VARIANTS, N, normal

LINEAR = [name for name, codec in CODECS.items() if codec.rounds]
jit = functools.partial(jax.jit, compiler_options=EXACT_BITS)


@pytest.mark.parametrize("name", each(LINEAR, full=VARIANTS))
def test_sums_of_payloads_are_payloads_of_sums(name):
    codec, x, y = CODECS[name], normal(N, 1), normal(N, 2)
    state = codec.init(N, jnp.uint32(0))
    # Each product has at most 20 terms, none above 4 |M| |Q|, and two products are
    # added.
    close = {"rtol": 0, "atol": 64 * EPS * 4 * float(jnp.linalg.norm(x))}
    sizes = codec.round_sizes(N)
    assert codec.rounds == len(sizes)
    project = jit(lambda v, sums: codec.project(codec.leaves(v), state, sums))
    rebuild = jit(lambda sums: codec.rebuild(state, sums, N))
    sums = ()
    for size in sizes:
        a, b, both = (project(v, sums) for v in (x, y, x + y))
        chex.assert_shape([a, b], (size,))
        chex.assert_trees_all_close(a + b, both, **close)
        sums = (*sums, a + b)
    one, other, summed = (rebuild((*sums[:-1], v)) for v in (a, b, sums[-1]))
    chex.assert_trees_all_close(optax.tree.add(one, other), summed, **close)


@pytest.mark.parametrize("name", each(LINEAR, full=VARIANTS))
def test_linear_sum_over_one_device_equals_its_encoding(name):
    codec, x = CODECS[name], normal(N)
    state = codec.init(N, jnp.uint32(0))

    def in_rounds(x, state):
        leaves, sums = codec.leaves(x), ()
        for _ in range(codec.rounds):
            sums = (*sums, codec.project(leaves, state, sums))
        after = codec.settled(leaves, state, sums, sums[-1])
        return codec.rebuild(state, sums, N), after

    def encoded(x, state):
        payload, after = codec.encode(x, state)
        return codec.leaves(codec.decode(payload, N)), after

    assert_bits_equal(jit(in_rounds)(x, state), jit(encoded)(x, state))
