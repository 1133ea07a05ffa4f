"""Tests payloads of one and two bits against bytes that are derived by hand."""

import numpy as np

from pipejax import codecs as c

from .payloads import encoded, scales


def test_sign_equals_a_payload_by_hand():
    """Bit i of byte j is the sign of element j of block i.

    The scale is the mean, 24 / 8 in the first block.
    """
    x = [1, -1, 2, -2, 3, -3, 4, -8]
    blocks = [x, [-1] * 8, *[[5] * 8] * 5, [-6] * 8]
    payload, decoded = encoded(c.sign(8), np.ravel(blocks))
    assert payload.tobytes() == b"\x82\x83" * 4 + scales(3, 1, *[5] * 5, 6)
    np.testing.assert_array_equal(decoded, np.ravel([[3, -3] * 4, *blocks[1:]]))


def test_int2_equals_a_payload_by_hand():
    """Element j of block i is in bits `2 i` of byte j: its sign, and if it is large.

    The mean magnitude is 8, so that the levels are 5 and 15. Elements above 10 are
    large.
    """
    x = [1, -1, 10, -10, 11, -11, 0, 20]
    rest = np.repeat([[8], [-8], [16]], 8, axis=1)
    payload, decoded = encoded(c.int2(8), np.ravel([x, *rest]))
    codes = [0, 1, 0, 1, 2, 3, 0, 2]
    assert payload.tobytes() == bytes(q | 1 << 4 for q in codes) + scales(8, 8, 8, 16)
    levels = np.float32([5, -5, 5, -5, 15, -15, 5, 15])
    np.testing.assert_array_equal(decoded, np.ravel([levels, *rest * (5 / 8)]))


def test_int2_has_the_best_spacing_for_normal_numbers():
    """Spacings that are 5 % larger or smaller have larger errors."""
    x = np.random.default_rng(0).normal(size=2**18)
    _, decoded = encoded(c.int2(2**16), x)
    errors = [np.mean((decoded * factor - x) ** 2) for factor in (0.95, 1, 1.05)]
    # The least error of four equally spaced levels is 0.1188 (Max 1960).
    assert errors[1] == min(errors)
    np.testing.assert_allclose(errors[1], 0.1188, rtol=0.02)
