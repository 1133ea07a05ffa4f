"""Tests payloads of integers against bytes that are derived by hand."""

import numpy as np

from pipejax import codecs as c

from .payloads import encoded, scales


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
