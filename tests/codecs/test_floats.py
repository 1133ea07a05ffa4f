"""Tests payloads of floats against bytes that are derived by hand."""

import ml_dtypes
import numpy as np
import pytest

from pipejax import codecs as c

from .payloads import encoded, scales


def test_fp4_equals_a_payload_by_hand():
    """The codes number the floats 0, .5, 1, 1.5, 2, 3, 4, 6; ties go to even codes."""
    x = [6, -5, 3.5, 2.5, -1.75, 1.25, 0.75, -0.25]
    payload, decoded = encoded(c.fp4(8), [*x, *[-12] * 8])
    # The codes are 7, -6, 6, 4, -4, 2, 2, 0, then -7, and -n is 16 - n in four bits.
    assert payload.tobytes() == b"\x97\x9a\x96\x94\x9c\x92\x92\x90" + scales(6, 12)
    np.testing.assert_array_equal(decoded, [6, -4, 4, 2, -2, 1, 1, 0, *[-12] * 8])


def test_fp4_rounds_as_the_dtype_float4():
    """ml_dtypes rounds to E2M1 as `fp4` does, for any number in the range."""
    x = np.random.default_rng(0).uniform(-6, 6, 8192).astype(np.float32)
    x[[0, 4096]] = 6
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
