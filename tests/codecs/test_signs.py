"""Tests payloads of one and two bits against bytes that are derived by hand."""

import numpy as np

from pipejax import codecs as c

from .payloads import encoded, scales


def test_sign_equals_a_payload_by_hand():
    """Bit i of the byte is the sign of element i, and the scale is the mean, 24 / 8."""
    payload, decoded = encoded(c.sign(8), [1, -1, 2, -2, 3, -3, 4, -8])
    assert payload.tobytes() == b"\xaa" + scales(3)
    np.testing.assert_array_equal(decoded, [3, -3] * 4)


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
