"""Tests what `Codec` promises of every codec: sizes, bounds, and non-finite numbers."""

import itertools

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ..helpers import assert_bits_equal
from .conformance import (
    CODECS,
    EPS,
    FAMILIES,
    ROWS,
    TINY,
    compiled,
    dtypes,
    due,
    every_codec,
    every_length,
    exponents,
    lengths,
    normal,
    programs,
    seeds,
    vectors,
)


@every_length
def test_payload_and_state_keep_their_form(name, n):
    codec = CODECS[name]
    program = compiled(name, n)
    x, state = normal(n), program.state(3)
    payload, after = program.encode(x, state)
    assert payload.ndim == 1
    assert jnp.issubdtype(payload.dtype, jnp.unsignedinteger)
    assert payload.nbytes == codec.size(n)
    assert_bits_equal((payload, after), program.encode(x, state))
    assert all(leaf.ndim for leaf in jax.tree.leaves(state))
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    chex.assert_shape([program.decode(payload), program.bound(x)], (n,))
    chex.assert_type([program.decode(payload), program.bound(x)], jnp.float32)
    abstract = jax.eval_shape(codec.encode, x, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, (payload, after))


@every_length
def test_row_under_vmap_equals_the_codec_alone(name, n):
    """A codec gives the same state and result under `jit` as in a row under `vmap`."""
    program, alone = programs(name, n), compiled(name, n)
    rows = np.stack([normal(n, seed) for seed in range(ROWS)])
    payloads, after = program.encode(rows, program.state)
    got = program.decode(payloads)
    for i, row in enumerate(rows[:3]):
        payload, then = alone.encode(row, alone.state(i))
        assert payload.shape == payloads[i].shape
        # Sums may be computed in another order: sums of at most 128 terms in a block of
        # sign, and three times sums of fewer terms in a matrix of power_sgd. No code of
        # any codec is close enough to the next one for this to change it.
        close = {"rtol": 512 * EPS, "atol": 512 * EPS * float(np.abs(row).max())}
        chex.assert_trees_all_close(got[i], alone.decode(payload), **close)
        chex.assert_trees_all_close(
            [s[i] for s in jax.tree.leaves(after)], jax.tree.leaves(then), **close
        )


def assert_within_bound(name, n, batches):
    """Encodes batches of rows [rows, n], and checks the errors by `bounds.bound`."""
    program = programs(name, n, batches[0].dtype.name)
    state = program.state
    for x in batches:
        wanted = due(CODECS[name], x, state)
        payload, state = program.encode(x, state)
        # A float64 vector is rounded to float32 first, and the bound is for the rounded
        # vector.
        with np.errstate(over="ignore"):
            rounded = wanted.astype(np.float32)
        got, bound = np.asarray(program.decode(payload)), program.bound(rounded)
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.abs(got.astype(np.float64) - rounded)
            within = error <= np.asarray(bound, np.float64) + TINY
        # An infinite bound claims nothing. With feedback, sums of huge vectors become
        # infinite.
        finite = np.isfinite(rounded).all(axis=1, keepdims=True)
        within |= np.isposinf(bound) | ~finite
        row, i = np.unravel_index(np.argmin(within), within.shape)
        assert within.all(), (n, row, i, wanted[row, i], got[row, i], bound[row, i])


@every_codec
@hypothesis.given(exponent=exponents, seed=seeds, dtype=dtypes)
def test_errors_of_vectors_are_bounded(name, exponent, seed, dtype):
    for n in lengths(name):
        batches = [vectors(n, exponent, seed + step, dtype) for step in range(2)]
        assert_within_bound(name, n, batches)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@every_codec
@hypothesis.given(numbers=arrays(np.float32, (2, 16), elements=floats))
def test_errors_of_arbitrary_floats_are_bounded(name, numbers):
    for n in lengths(name):
        # Each row starts at another one of the numbers.
        starts = np.arange(n)[None, :] + np.arange(ROWS)[:, None]
        assert_within_bound(name, n, [row[starts % row.size] for row in numbers])


@every_codec
@hypothesis.given(
    # The last one is infinite as a float32, and travels as float32.
    value=st.sampled_from([np.nan, np.inf, -np.inf, 1e300]),
    place=st.floats(0, 1, exclude_max=True),
    exponent=exponents,
    seed=seeds,
    dtype=dtypes,
)
def test_nan_and_infinity_are_not_lost(name, value, place, exponent, seed, dtype):
    for n in lengths(name):
        program = programs(name, n, dtype)
        _, state = program.encode(vectors(n, 0, seed, dtype), program.state)
        x = vectors(n, exponent, seed + 1, dtype)
        with np.errstate(over="ignore"):
            x[:, int(place * n)] = value
        got = np.asarray(program.decode(program.encode(x, state)[0]))
        lost = np.isfinite(got).all(axis=1)
        assert not lost.any(), (n, list(itertools.compress(FAMILIES, lost)))
