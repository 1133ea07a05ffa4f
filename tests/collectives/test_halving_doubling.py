"""Tests partners at halving distances, and how devices beyond a power of 2 fold."""

import pytest

from pipejax.collectives import halving_doubling

from .routes import Halving, Sent, encodings, sent


def exchanges(*found):
    return [Sent("collective-permute", pairs, size) for pairs, size in found]


def test_four_devices_exchange_halves_then_quarters():
    """Half of 8 float32 numbers goes to the partner 2 away, a quarter to the next."""
    far, near = [[0, 2], [1, 3], [2, 0], [3, 1]], [[0, 1], [1, 0], [2, 3], [3, 2]]
    wanted = exchanges((far, 16), (near, 8), (near, 8), (far, 16))
    assert sent(halving_doubling(), 4, 8) == wanted


def test_three_devices_fold_the_last_into_the_first():
    """The last device sends its whole vector to the first, which returns the result."""
    pair = [[0, 1], [1, 0]]
    wanted = exchanges(([[2, 0]], 32), (pair, 16), (pair, 16), ([[0, 2]], 32))
    assert sent(halving_doubling(), 3, 8) == wanted


def test_six_devices_fold_two_and_run_as_four():
    """Devices 4 and 5 fold into 0 and 1 at first; the others run as four devices do."""
    found = sent(halving_doubling(), 6, 8)
    assert found[0] == Sent("collective-permute", [[4, 0], [5, 1]], 32)
    assert found[1:-1] == sent(halving_doubling(), 4, 8)
    assert found[-1] == Sent("collective-permute", [[0, 4], [1, 5]], 32)


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [
        # A number is encoded once for each bit in which device and piece differ, and
        # once by the owner.
        (4, [[1, 2, 2, 3], [2, 1, 3, 2], [2, 3, 1, 2], [3, 2, 2, 1]]),
        # Device 2 folds into 0, so its numbers are encoded once more.
        (3, [[1, 2, 2], [2, 1, 3]]),
    ],
)
def test_each_piece_is_encoded_at_every_exchange(devices, wanted):
    coded = halving_doubling(Halving())
    assert encodings(coded, devices, pieces=len(wanted)) == wanted
