"""Tests sparse payloads by hand: which elements are sent, their places and number."""

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
    """The payload holds places, largest magnitude first, then the values' bits."""
    codec = c.top_k(3)
    payload, _ = codec.encode(jnp.float32([1, -3, 0.5, 2]), ())
    assert_bits_equal(payload[:3], np.uint32([1, 3, 0]))
    assert_bits_equal(payload[3:], np.float32([-3, 2, 1]).view(np.uint32))
    assert_bits_equal(codec.decode(payload, 4), np.float32([1, -3, 0, 2]))


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
