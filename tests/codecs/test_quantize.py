"""Tests quantization between a message's minimum and maximum, by hand."""

import jax
import numpy as np
import pytest

from pipejax import codecs as c

MAX = np.finfo(np.float32).max


def encoded(bits, x):
    """Returns the payload of x, and the vector decoded from it."""
    codec, x = c.quantize(bits), np.asarray(x, np.float32)
    payload, _ = jax.jit(codec.encode)(x, ())
    decoded = jax.jit(codec.decode, static_argnums=1)(payload, x.size)
    return np.asarray(payload), np.asarray(decoded)


def test_quantize_to_two_bits_equals_a_payload_by_hand():
    """Four levels lie between -1 and 5, 2 apart; a tie goes to the even level."""
    x = [-1, 1, 3, 5, 0, 2, 4, 4.9]
    payload, decoded = encoded(2, x)
    # In byte i, element i + 2 is shifted by two bits, i + 4 by four and i + 6 by six.
    codes = [0, 1, 2, 3, 0, 2, 2, 3]
    assert codes[0] | codes[2] << 2 | codes[4] << 4 | codes[6] << 6 == 0x88
    assert codes[1] | codes[3] << 2 | codes[5] << 4 | codes[7] << 6 == 0xED
    assert payload.tobytes() == b"\x88\xed" + np.array([-1, 2], "<f4").tobytes()
    np.testing.assert_array_equal(decoded, [-1, 1, 3, 5, -1, 3, 3, 5])


def test_outlier_widens_all_levels():
    """The 16 levels from 0 to 15,000 are 1,000 apart, so that 1 and 2 become 0."""
    _, decoded = encoded(4, [0, 1, 2, 15e3])
    # XLA multiplies by 1/15 instead of dividing, so the last number may differ by one
    # rounding.
    np.testing.assert_allclose(decoded, [0, 0, 0, 15e3], rtol=2.0**-23)


@pytest.mark.parametrize("bits", [1, 8])
def test_equal_elements_are_decoded_exactly(bits):
    """All elements equal the minimum, and nothing is divided by the distance of 0."""
    payload, decoded = encoded(bits, [0.1] * 8)
    assert payload[: bits + 4].tobytes() == bytes(bits) + np.float32(0.1).tobytes()
    np.testing.assert_array_equal(decoded, np.full(8, 0.1, np.float32))


def test_range_beyond_the_largest_number_has_finite_codes():
    """MAX - (-MAX) is infinite in float32, but a 255th of it and all codes are finite.

    `q level` overflows for the larger codes.
    """
    payload, decoded = encoded(8, [-MAX, -MAX / 3, MAX / 3, MAX])
    assert payload[:4].tolist() == [0, 85, 170, 255]
    # 85 levels are a third of the way, and 1e-6 is a few roundings of float32.
    np.testing.assert_allclose(decoded[:2], [-MAX, -MAX / 3], rtol=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.4, 0.6, 0.8, 1.0])
def test_numbers_near_the_largest_are_accurate_or_not_finite(bits, share):
    """The level spacing is above 2^127 in some cases, so that `2 / d` is subnormal."""
    top = share * float(MAX)
    x = np.float32(np.linspace(-top, top, 8))
    _, decoded = encoded(bits, x)
    within = np.abs(decoded / 4 - x / 4) <= top / (2**bits - 1) / 4 * (1 + 1e-5)
    assert (within | ~np.isfinite(decoded)).all()
    assert np.isfinite(decoded).all() == (share < 0.5)


def test_nan_in_a_long_vector_spoils_all_elements():
    """A NaN among 5,000 elements is found; XLA's minimum may lose it on CPUs."""
    x = np.ones(5000, np.float32)
    x[4321] = np.nan
    assert np.isnan(encoded(8, x)[1]).all()
