"""Tests that each message holds a whole vector, over the link of device 0."""

import numpy as np
import pytest

from pipejax import codecs
from pipejax.collectives import parameter_server

from .routes import Halving, Sent, encodings, sent, sums


@pytest.mark.parametrize("devices", [1, 3, 4])
def test_messages_go_to_the_server_and_back_one_by_one(devices):
    """Each message holds 12 float32 numbers."""
    pairs = [[rank, 0] for rank in range(1, devices)]
    pairs += [[0, rank] for rank in range(1, devices)]
    wanted = [Sent("collective-permute", [pair], 48) for pair in pairs]
    assert sent(parameter_server(), devices, 12) == wanted


def test_server_receives_and_sends_one_message_a_device():
    """The server receives and sends 3 messages of 64 codes and a scale."""
    found = sent(parameter_server(codecs.int8(64)), 4, 64)
    assert sum(x.bytes for x in found if x.among[0][1] == 0) == 3 * 68
    assert sum(x.bytes for x in found if x.among[0][0] == 0) == 3 * 68


def test_each_element_is_encoded_twice():
    """The server encodes its own vector too, although it does not send that."""
    assert encodings(parameter_server(Halving()), 3, pieces=1) == [[2, 2, 2]]


def test_vectors_are_summed_in_the_order_of_the_devices():
    """In float32, 2^24 + 1 is 2^24; (1 + 1) + 2^24 keeps both ones."""
    rows = [[1], [1], [2.0**24]]
    wanted = np.full((3, 1), 2.0**24 + 2)
    np.testing.assert_array_equal(sums(parameter_server(), rows), wanted)
    wanted = np.full((3, 1), 2.0**24)
    np.testing.assert_array_equal(sums(parameter_server(), rows[::-1]), wanted)
