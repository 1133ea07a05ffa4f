"""Tests what travels inside hosts and between them, and how often it is encoded."""

from pipejax import codecs
from pipejax.collectives import hierarchical, ring, tree, two_shot

from .routes import Halving, Sent, encodings, sent


def test_devices_send_their_share_between_hosts():
    """2 hosts of 3 devices share 12 numbers: devices send 4, then 2 between hosts."""
    inside, between = [[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]
    assert sent(hierarchical(), 6, 12, hosts=2) == [
        Sent("all-to-all", inside, 48),
        Sent("all-to-all", between, 16),
        Sent("all-gather", between, 8),
        Sent("all-gather", inside, 16),
    ]


def test_outer_codec_compresses_only_traffic_between_hosts():
    """On 2 hosts of 2 devices, 16 of 32 numbers are coded as 16 bytes and a scale."""
    found = sent(hierarchical(outer=tree(codecs.int8(16))), 4, 32, hosts=2)
    inside, up, down = [[0, 1], [2, 3]], [[2, 0], [3, 1]], [[0, 2], [1, 3]]
    assert found == [
        Sent("all-to-all", inside, 128),
        Sent("collective-permute", up, 20),
        Sent("collective-permute", down, 20),
        Sent("all-gather", inside, 64),
    ]


def test_outer_codec_encodes_sums_of_hosts_twice():
    """Each number is encoded twice: in a host's sum, and in the sum of both hosts."""
    coded = hierarchical(outer=two_shot(Halving()))
    assert encodings(coded, 4, pieces=2, hosts=2) == [[2, 2, 2, 2]] * 2


def test_inner_codec_encodes_inside_both_hosts():
    """Device j of a host owns piece j, and its neighbour's part makes one hop to it."""
    coded = hierarchical(inner=ring(Halving()))
    assert encodings(coded, 4, pieces=2, hosts=2) == [[1, 2, 1, 2], [2, 1, 2, 1]]
