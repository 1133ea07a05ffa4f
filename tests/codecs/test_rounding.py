"""Tests rounding to integers by given noise, and where `stochastic` takes its noise."""

import jax
import jax.numpy as jnp
import numpy as np

from pipejax import codecs as c
from pipejax.codecs._rounding import to_integer

from ..grid import grid
from ..helpers import assert_bits_equal
from .bounds import bound
from .conformance import KEY, normal


@grid(
    1,
    noise=[1 - 2.0**-24, 0.0],
    codec=[c.int8(8), c.int4(8), c.fp4(8), c.quantize(8), c.bf16()],
)
def test_stochastic_rounding_stays_within_its_levels(codec, noise):
    """A block's largest element, times L over itself, may be rounded to more than L."""
    x = normal(2**16)

    @jax.jit
    def decoded(x):
        payload = codec.rounded(x, jnp.full(x.size, noise))
        return codec.decode(payload, x.size), bound(codec, x)

    found, most = decoded(x)
    assert (np.abs(found - x) <= 2 * most).all()


def test_ties_go_to_the_even_integer():
    y = jnp.float32([0.5, 1.5, 2.5, -0.5, -1.5, 2.49])
    assert_bits_equal(to_integer(y, None, 3), np.float32([0, 2, 2, -0.0, -2, 2]))


def test_noise_rounds_up_as_often_as_the_fraction_says():
    """With noise in the middle of 100 equal intervals, 2.25 becomes 3 25 times."""
    noise = (jnp.arange(100, dtype=jnp.float32) + 0.5) / 100
    for y, up in [(2.25, 25), (-2.25, 75), (3.0, 0), (-0.01, 99)]:
        got = to_integer(jnp.full(100, y, jnp.float32), noise, 7)
        assert set(np.unique(got)) <= {np.floor(y), np.floor(y) + 1}
        assert (got == np.floor(y) + 1).sum() == up


def test_noise_rounds_nothing_beyond_the_top_level():
    """7 plus the largest noise rounds to 8, and the floor of -7 - epsilon is -8."""
    y = jnp.float32([7, np.nextafter(np.float32(-7), np.float32(-8))])
    noise = jnp.float32([1 - 2.0**-24, 0])
    assert jnp.floor(y + noise).tolist() == [8, -8]
    assert_bits_equal(to_integer(y, noise, 7), np.float32([7, -7]))


def test_noise_differs_between_vectors():
    """One half of a split key makes the noise, and the other half is the next state."""
    codec, inner, x = c.stochastic(c.int8(8), KEY), c.int8(8), normal(64)
    state, key = codec.init(64, jnp.uint32(5)), jax.random.fold_in(KEY, 5)
    payloads = []
    for _ in range(2):
        payload, state = codec.encode(jnp.asarray(x), state)
        key, now = jax.random.split(key)
        noise = jax.random.uniform(now, (64,), jnp.float32)
        assert_bits_equal(payload, inner.rounded(jnp.asarray(x), noise))
        assert_bits_equal(state, jax.random.key_data(key))
        payloads.append(np.asarray(payload))
    assert not np.array_equal(*payloads)


def test_state_keeps_the_kind_of_key():
    """A key of "rbg" has four words, and a key of the default kind has two."""
    for key, words in (KEY, 2), (jax.random.key(0, impl="rbg"), 4):
        codec = c.stochastic(c.int8(8), key)
        state = jax.eval_shape(codec.init, 8, jnp.uint32(0))
        _, after = jax.eval_shape(codec.encode, jnp.zeros(8), state)
        assert state.shape == after.shape == (words,)
