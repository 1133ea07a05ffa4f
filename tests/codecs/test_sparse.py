"""Tests sparse payloads by hand: which elements are sent, their places and number."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import codecs as c
from pipejax.codecs._sparse import count

from ..helpers import assert_bits_equal
from .conformance import KEY


def draws(codec, x, seeds):
    """Encodes and decodes x under the first state of each of `seeds` seeds."""

    def one(seed):
        payload, _ = codec.encode(x, codec.init(x.size, seed))
        return codec.decode(payload, x.size)

    return np.asarray(jax.jit(jax.vmap(one))(jnp.arange(seeds, dtype=jnp.uint32)))


def test_top_k_equals_a_payload_by_hand():
    """The payload holds the lower 8 bits of the places, the upper 4, and the values.

    In each chunk, the largest magnitude comes first. 2 x 2 elements are padded to 8.
    """
    codec = c.top_k(2, values=c.cast("float32"), chunk=300)
    x = np.zeros(599, np.float32)  # chunks of 300, of which the last has a zero more
    x[[1, 257]] = [2, -3]
    x[300 + np.array([298, 5])] = [0.5, -0.25]
    payload, _ = jax.jit(codec.encode)(x, ())
    payload = np.asarray(payload)
    assert payload.nbytes == codec.size(599) == 8 + 4 + 8 * 4
    low, high = payload[:2].view(np.uint8), payload[2:3].view(np.uint8)
    assert low.tolist() == [257 - 256, 1, 298 - 256, 5, 0, 0, 0, 0]
    # Element i of the upper bits is in byte i % 4.
    assert high.tolist() == [1, 0, 1, 0]
    assert_bits_equal(payload[3:7].view(np.float32), np.float32([-3, 2, 0.5, -0.25]))
    assert_bits_equal(codec.decode(jnp.asarray(payload), 599), x)


@pytest.mark.parametrize("n", [1, 100, 4096, 4097, 10_000])
def test_top_k_sends_the_largest_of_each_chunk(n):
    """Chunks have equal lengths, and only the last one is padded."""
    x = np.random.default_rng(n).normal(size=n).astype(np.float32)
    codec = c.top_k(0.1, values=c.cast("float32"))
    payload, _ = jax.jit(codec.encode)(x, ())
    length = math.ceil(n / math.ceil(n / 4096))
    wanted = np.zeros_like(x)
    for start in range(0, n, length):
        piece = x[start : start + length]
        most = np.argsort(-np.abs(piece))[: max(1, round(0.1 * length))]
        wanted[start + most] = piece[most]
    decode = jax.jit(codec.decode, static_argnums=1)
    assert_bits_equal(decode(payload, n), wanted)


def test_values_of_top_k_travel_as_payloads_of_their_codec():
    """Eight values are one block of int8, with a scale of 4 bytes."""
    x = np.zeros(64, np.float32)
    x[::8] = [127, -5.4, 7, 1, 2, 3, 4, 5]
    codec = c.top_k(8, values=c.int8(8))
    payload, _ = jax.jit(codec.encode)(x, ())
    assert payload.nbytes == codec.size(64) == 8 + 4 + 8 + 4
    decoded = jax.jit(codec.decode, static_argnums=1)(payload, 64)
    np.testing.assert_array_equal(decoded, np.round(x))


def test_state_of_the_values_is_kept():
    inner = c.stochastic(c.int8(8), KEY)
    codec, x = c.top_k(8, values=inner), jnp.ones(64)
    state = codec.init(64, jnp.uint32(3))
    assert_bits_equal(state, inner.init(8, jnp.uint32(3)))
    assert_bits_equal(codec.encode(x, state)[1], inner.encode(x[:8], state)[1])


def test_values_in_float16_get_the_headroom_of_the_devices():
    codec = c.top_k(1, values=c.cast("float16")).of(devices=8)
    assert codec.values.headroom == 8


def test_top_k_sends_a_nan_before_the_largest():
    codec = c.top_k(1)
    payload, _ = codec.encode(jnp.float32([1e30, np.nan, -1e38]), ())
    np.testing.assert_array_equal(codec.decode(payload, 3), [0, np.nan, 0])


@pytest.mark.parametrize("scaled", [True, False])
def test_random_k_draws_one_element_of_each_part(scaled):
    """
    Three parts of 4, 4 and 2 elements have one draw each, with probability 1/4.

    An element is missing from all of 100 draws with probability 3e-13. Two of the last
    part's four places lie beyond the end, so half of its draws send nothing.
    """
    x = np.arange(1, 11, dtype=np.float32)
    got = draws(c.random_k(3, KEY, scaled=scaled), jnp.asarray(x), 100)
    parts = np.split(got, [4, 8], axis=1)
    drawn = [np.count_nonzero(part, axis=1) for part in parts]
    assert (drawn[0] == 1).all()
    assert (drawn[1] == 1).all()
    assert set(drawn[2]) == {0, 1}
    np.testing.assert_array_equal(got.max(axis=0), x * (4 if scaled else 1))


def test_random_k_is_decoded_by_the_word_in_the_payload():
    """The payload's first word gives the places; the receiver's key does not matter."""
    codec, x = c.random_k(8, KEY), jnp.arange(1, 65, dtype=jnp.float32)
    payload, _ = jax.jit(codec.encode)(x, codec.init(64, jnp.uint32(7)))
    decoded = codec.decode(payload, 64)
    assert_bits_equal(c.random_k(8, jax.random.key(1)).decode(payload, 64), decoded)
    # Both would draw the same one of 8 elements in each of 8 parts with probability
    # 6e-8.
    other = payload.at[0].add(1)
    assert not np.array_equal(codec.decode(other, 64), decoded)


@pytest.mark.parametrize(
    ("k", "n", "wanted"),
    [(5, 5, 5), (0.1, 30, 3), (0.01, 30, 1), (0.01, 1000, 10), (0.999, 10, 10)],
)
def test_fraction_k_is_rounded_to_at_least_one_element(k, n, wanted):
    assert count(k, n) == wanted


@pytest.mark.parametrize(
    ("k", "n", "sent"),
    [(600, 1000, 500), (0.99, 1000, 500), (0.1, 1005, 92), (4, 9, 3)],
)
def test_random_k_sends_no_part_without_an_element(k, n, sent):
    codec = c.random_k(k, KEY)
    assert codec.size(n) == 4 * (1 + sent)
    x = jnp.ones(n)
    values = codec.project(x, codec.init(n, jnp.uint32(0)), ())
    assert values.shape == (sent,)
    means = np.mean(draws(codec, x, 400), axis=0)
    np.testing.assert_allclose(means.mean(), 1.0, atol=0.1)
