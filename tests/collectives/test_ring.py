"""Tests a ring's hops: their partners and sizes, and the order of its sums."""

import numpy as np
import pytest

from pipejax.collectives import ring

from .routes import Halving, Sent, encodings, sent, sums


@pytest.mark.parametrize(
    ("devices", "to_next"),
    [
        (3, [[0, 1], [1, 2], [2, 0]]),
        (4, [[0, 1], [1, 2], [2, 3], [3, 0]]),
    ],
)
def test_every_hop_sends_a_piece_to_the_next_device(devices, to_next):
    """Each device sends a p-th of 12 float32 numbers 2(p-1) times."""
    hop = Sent("collective-permute", to_next, 48 // devices)
    assert sent(ring(), devices, 12) == [hop] * (2 * (devices - 1))


def test_each_piece_is_encoded_at_every_hop():
    """Piece j starts at device j + 1, whose numbers are encoded 3 times."""
    assert encodings(ring(Halving()), 3, pieces=3) == [[1, 3, 2], [2, 1, 3], [3, 2, 1]]


def test_each_piece_is_summed_in_the_order_of_its_hops():
    """In float32, 2^24 + 1 is 2^24, so the sum shows the order of the summands.

    Piece 0 is (1 + 1) + 2^24, piece 1 is (1 + 2^24) + 1 and piece 2 (2^24 + 1) + 1.
    """
    rows = [[2.0**24] * 3, [1] * 3, [1] * 3]
    wanted = [2.0**24 + 2, 2.0**24, 2.0**24]
    np.testing.assert_array_equal(sums(ring(), rows), [wanted] * 3)
