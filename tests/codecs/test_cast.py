"""Tests casts against the bits of float32, whose upper half is a bfloat16."""

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import codecs as c

from ..helpers import assert_bits_equal
from .bounds import bound

# These are 1 plus half a unit in the last place of bfloat16, which is a tie; a tie
# above an odd number; a little more than the first tie; and the negative of the first
# tie.
BITS = np.uint32([0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000])


def payload(codec, bits):
    encoded, _ = codec.encode(jnp.asarray(bits.view(np.float32)), ())
    return encoded


def test_bf16_rounds_ties_to_even():
    wanted = np.uint16([0x3F80, 0x3F82, 0x3F81, 0xBF80])
    assert_bits_equal(payload(c.bf16(), BITS), wanted)


def test_truncate_drops_the_lower_half():
    wanted = np.uint16([0x3F80, 0x3F81, 0x3F80, 0xBF80])
    assert_bits_equal(payload(c.truncate(), BITS), wanted)


def test_float16_overflows_half_a_unit_above_its_largest():
    """65,520 is halfway from 65,504 to 65,536, which is even and becomes infinity."""
    x = jnp.float32([65519, 65520, -65520])
    encoded, _ = c.cast("float16").encode(x, ())
    assert_bits_equal(encoded, np.float16([65504, np.inf, -np.inf]).view(np.uint16))


def test_float16_leaves_headroom_for_sums_over_devices():
    """Over 5 devices, that is 8: in the range, and in the smallest magnitudes."""
    codec = c.cast("float16").of(devices=5)
    x = jnp.float32([8 * 65504, 1 / 3, 2.0**-21, 0.75 * 2.0**-21, 2.0**-22])
    encoded, _ = codec.encode(x, ())
    wanted = np.float16([65504, 1 / 24, 2.0**-24, 2.0**-24, 0])
    assert_bits_equal(encoded, wanted.view(np.uint16))
    assert_bits_equal(codec.decode(encoded, 5), 8 * wanted.astype(np.float32))
    error = jnp.abs(codec.decode(encoded, 5) - x)
    assert (error <= bound(codec, x)).all()
    assert bound(codec, jnp.float32([8 * 65504 + 8]))[0] == jnp.inf
    for other in (c.bf16(), c.cast("float32")):
        assert other.of(devices=5) == other


@pytest.mark.parametrize("sign", [0, 0x80000000])
def test_noise_rounds_up_in_proportion(sign):
    """A number a quarter of a unit above 1 is rounded up by noise of 3/4 or more."""
    x = np.full(4, 0x3F804000 | sign, np.uint32).view(np.float32)
    noise = jnp.float32([0, 0.7499, 0.75, 1 - 2.0**-24])
    wanted = np.uint16([0x3F80, 0x3F80, 0x3F81, 0x3F81]) | np.uint16(sign >> 16)
    assert_bits_equal(c.bf16().rounded(jnp.asarray(x), noise), wanted)


def test_noise_keeps_nan_and_infinity():
    """Adding noise to the bits would turn a NaN into 0, and infinity into a NaN."""
    x = np.uint32([0xFFFFFFFF, 0x7FFFFFFF, 0x7F800000, 0xFF800000]).view(np.float32)
    noise = jnp.full(4, 1 - 2.0**-24, jnp.float32)
    codec = c.bf16()
    decoded = np.asarray(codec.decode(codec.rounded(jnp.asarray(x), noise), 4))
    np.testing.assert_array_equal(decoded, [np.nan, np.nan, np.inf, -np.inf])
