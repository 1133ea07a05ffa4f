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
    """Element i is in the lower half of byte i, element i + 8 in the upper half."""
    x = [7, -7, 0, 1, -1, 2.5, 3.5, -0.4]
    payload, decoded = encoded(c.int4(8), [*x, 14, *[-2] * 7])
    assert payload.tobytes() == b"\x77\xf9\xf0\xf1\xff\xf2\xf4\xf0" + scales(7, 14)
    np.testing.assert_array_equal(decoded, [7, -7, 0, 1, -1, 2, 4, 0, 14, *[-2] * 7])
