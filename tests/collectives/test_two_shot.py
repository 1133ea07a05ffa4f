"""Tests the two collectives of two-shot: their sizes, order of sums and encodings."""

import numpy as np
import pytest

from pipejax import codecs
from pipejax.collectives import two_shot

from .routes import Halving, Sent, encodings, sent, sums


@pytest.mark.parametrize("devices", [3, 4])
def test_two_shot_is_an_all_to_all_and_an_all_gather(devices):
    """Each device sends 12 float32 numbers, then a p-th of them."""
    group = [[*range(devices)]]
    wanted = [Sent("all-to-all", group, 48), Sent("all-gather", group, 48 // devices)]
    assert sent(two_shot(), devices, 12) == wanted


def test_pieces_are_padded_to_whole_blocks():
    """3 devices code 20 numbers as 8 each, in 8 bytes and a scale of 4 bytes."""
    group = [[0, 1, 2]]
    wanted = [Sent("all-to-all", group, 3 * 12), Sent("all-gather", group, 12)]
    assert sent(two_shot(codecs.int8(8)), 3, 20) == wanted


def test_each_element_is_encoded_twice():
    """Each device encodes all of its pieces, and every owner encodes its sum."""
    assert encodings(two_shot(Halving()), 3, pieces=3) == [[2, 2, 2]] * 3


def test_test_pieces_are_summed_in_the_order_of_the_devices():
    """In float32, 2^24 + 1 is 2^24; (1 + 1) + 2^24 keeps both ones in every piece."""
    rows = [[1] * 3, [1] * 3, [2.0**24] * 3]
    np.testing.assert_array_equal(sums(two_shot(), rows), np.full((3, 3), 2.0**24 + 2))
    np.testing.assert_array_equal(
        sums(two_shot(), rows[::-1]), np.full((3, 3), 2.0**24)
    )
