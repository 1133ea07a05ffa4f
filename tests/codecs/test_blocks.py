"""Tests the payloads of block codecs against bytes that are derived by hand."""

import jax
import ml_dtypes
import numpy as np
import pytest

from pipejax import codecs as c

from ..helpers import assert_bits_equal


def encoded(codec, x):
    """Returns the payload of x, and the vector decoded from it."""
    x = np.asarray(x, np.float32)
    payload, _ = jax.jit(codec.encode)(x, ())
    decoded = jax.jit(codec.decode, static_argnums=1)(payload, x.size)
    return np.asarray(payload), np.asarray(decoded)


def scales(*values):
    """Returns the bytes of float32 scales, the least significant byte first."""
    return np.array(values, "<f4").tobytes()


def test_int8_equals_a_payload_by_hand():
    """With a scale of 127, levels are 1 apart; a tie goes to the even level."""
    x = [127, -127, 0, 1, -1, 2.5, 3.5, -0.4]
    payload, decoded = encoded(c.int8(8), x)
    levels = [127, -127, 0, 1, -1, 2, 4, 0]
    assert payload.tobytes() == np.int8(levels).tobytes() + scales(127)
    np.testing.assert_array_equal(decoded, levels)


def test_int4_equals_a_payload_by_hand():
    """Element i is in the lower half of byte i, element i + 4 in the upper half."""
    payload, decoded = encoded(c.int4(8), [7, -7, 0, 1, -1, 2.5, 3.5, -0.4])
    assert payload.tobytes() == b"\xf7\x29\x40\x01" + scales(7)
    np.testing.assert_array_equal(decoded, [7, -7, 0, 1, -1, 2, 4, 0])


def test_int2_equals_a_payload_by_hand():
    """Element i is in bits `2 (i // 2)` of byte `i % 2`: its sign, and if it is large.

    The mean magnitude is 8, so that the levels are 5 and 15. Elements above 10 are
    large.
    """
    payload, decoded = encoded(c.int2(8), [1, -1, 10, -10, 11, -11, 0, 20])
    even, odd = 0 | 0 << 2 | 2 << 4 | 0 << 6, 1 | 1 << 2 | 3 << 4 | 2 << 6
    assert payload.tobytes() == bytes([even, odd]) + scales(8)
    np.testing.assert_array_equal(decoded, [5, -5, 5, -5, 15, -15, 5, 15])


def test_int2_has_the_best_spacing_for_normal_numbers():
    """Spacings that are 5 % larger or smaller have larger errors."""
    x = np.random.default_rng(0).normal(size=2**16)
    _, decoded = encoded(c.int2(2**16), x)
    errors = [np.mean((decoded * factor - x) ** 2) for factor in (0.95, 1, 1.05)]
    # The least error of four equally spaced levels is 0.1188 (Max 1960).
    assert errors[1] == min(errors)
    np.testing.assert_allclose(errors[1], 0.1188, rtol=0.02)


def test_fp4_equals_a_payload_by_hand():
    """The codes number the floats 0, .5, 1, 1.5, 2, 3, 4, 6; ties go to even codes."""
    x = [6, -5, 3.5, 2.5, -1.75, 1.25, 0.75, -0.25]
    payload, decoded = encoded(c.fp4(8), x)
    # The codes are 7, -6, 6, 4, -4, 2, 2, 0, and -n is 16 - n in four bits.
    assert payload.tobytes() == b"\xc7\x2a\x26\x04" + scales(6)
    np.testing.assert_array_equal(decoded, [6, -4, 4, 2, -2, 1, 1, 0])


def test_fp4_rounds_as_the_dtype_float4():
    """ml_dtypes rounds to E2M1 as `fp4` does, for any number in the range."""
    x = np.random.default_rng(0).uniform(-6, 6, 4096).astype(np.float32)
    x[0] = 6
    _, decoded = encoded(c.fp4(4096), x)
    np.testing.assert_array_equal(decoded, x.astype(ml_dtypes.float4_e2m1fn))


@pytest.mark.parametrize(
    ("format", "top", "codes"),
    [
        # e4m3 has 4 bits of exponent and 3 of mantissa, so 1 is 0 0111 000. e5m2 has 5
        # and 2.
        ("e4m3", 448, b"\x7e\xfe\x38\xb8\x00\x39\x38\x3a"),
        ("e5m2", 57344, b"\x7b\xfb\x3c\xbc\x00\x3c\x3c\x3d"),
    ],
)
def test_fp8_equals_a_payload_by_hand(format, top, codes):
    """A scale equal to the largest number changes nothing; ties go to even numbers."""
    x = [top, -top, 1, -1, 0, 1.125, 1.0625, 1.25]
    payload, decoded = encoded(c.fp8(format, 8), x)
    assert payload.tobytes() == codes + scales(top)
    rounded = {"e4m3": [1.125, 1, 1.25], "e5m2": [1, 1, 1.25]}[format]
    np.testing.assert_array_equal(decoded, [top, -top, 1, -1, 0, *rounded])


def test_sign_equals_a_payload_by_hand():
    """Bit i of the byte is the sign of element i, and the scale is the mean, 24 / 8."""
    payload, decoded = encoded(c.sign(8), [1, -1, 2, -2, 3, -3, 4, -8])
    assert payload.tobytes() == b"\xaa" + scales(3)
    np.testing.assert_array_equal(decoded, [3, -3] * 4)


def test_payload_holds_all_codes_before_all_scales():
    """An outlier in the second block does not change the levels of the first."""
    small = [127, 1, 2, 3, 4, 5, 6, 7]
    payload, decoded = encoded(c.int8(8), [*small, 127e6, *small[1:]])
    assert payload[:8].tobytes() == np.int8(small).tobytes()
    assert payload[16:].tobytes() == scales(127, 127e6)
    assert_bits_equal(decoded, np.float32([*small, 127e6, *[0] * 7]))


@pytest.mark.parametrize("make", [c.int8, c.int4, c.int2, c.fp4, c.fp8, c.sign])
def test_nan_in_a_long_block_is_kept(make):
    """XLA's maximum on CPUs loses a NaN in blocks of 4,096 elements and more."""
    x = np.ones(4096, np.float32)
    x[1234] = np.nan
    _, decoded = encoded(make(block=4096), x)
    assert np.isnan(decoded[1234])
