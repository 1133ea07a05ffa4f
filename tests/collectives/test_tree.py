"""Tests the exchanges of a binomial tree, and its encodings up and down."""

import numpy as np
import pytest

from pipejax.collectives import tree

from .routes import Halving, Sent, encodings, sent, sums

# Pairs of each level on the way up. On the way down, they are reversed.
UP = {
    2: [[[1, 0]]],
    3: [[[1, 0]], [[2, 0]]],
    4: [[[1, 0], [3, 2]], [[2, 0]]],
    5: [[[1, 0], [3, 2]], [[2, 0]], [[4, 0]]],
    8: [[[1, 0], [3, 2], [5, 4], [7, 6]], [[2, 0], [6, 4]], [[4, 0]]],
}


@pytest.mark.parametrize("devices", UP)
def test_whole_vectors_travel_up_and_down_the_tree(devices):
    """Each of `2 ceil(log2 p)` exchanges moves all 12 float32 numbers."""
    down = [[pair[::-1] for pair in level] for level in reversed(UP[devices])]
    wanted = [Sent("collective-permute", level, 48) for level in UP[devices] + down]
    assert sent(tree(), devices, 12) == wanted


def test_vector_is_encoded_once_a_level_and_once_downwards():
    """Device 3 sends by way of device 2; the root encodes only the sum."""
    assert encodings(tree(Halving()), 5, pieces=1) == [[1, 2, 2, 3, 2]]


def test_neighbours_are_summed_first():
    """In float32, 2^24 + 1 is 2^24; (2^24 + 1) + (1 + 1) loses one of three ones."""
    rows = [[2.0**24], [1], [1], [1]]
    np.testing.assert_array_equal(sums(tree(), rows), np.full((4, 1), 2.0**24 + 2))
