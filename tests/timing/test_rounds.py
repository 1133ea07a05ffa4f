"""Tests rounds of messages by hand, and that every sum reaches all devices."""

import itertools

import pytest

from pipejax import codecs
from pipejax.timing import COST_MODELS
from pipejax.timing._rounds import ROUNDS, Chunk

DEVICES = [1, 2, 3, 4, 5, 7, 8]


def messages(algorithm, p, n=8):
    """Returns pattern, (sender, receiver) pairs and bytes of every message."""
    return [
        (each.pattern, sorted(zip(*each.pairs(i), strict=True)), each.payload)
        for each in ROUNDS[algorithm](p, n, None)
        for i in range(each.repeat)
        if each.payload
    ]


def test_server_rounds_equal_messages_by_hand():
    up, down = [(1, 0)], [(0, 1)]
    assert messages("parameter_server", 3) == [
        *[("stream", up, 32), ("stream", [(2, 0)], 32)],
        *[("stream", down, 32), ("stream", [(0, 2)], 32)],
    ]


def test_tree_rounds_equal_messages_by_hand():
    """Five devices add up as a tree, and send the sum back down the same tree.

    First 1 sends to 0 and 3 to 2, then 2 to 0, and last 4 to 0.
    """
    up = [[(1, 0), (3, 2)], [(2, 0)], [(4, 0)]]
    down = [[(0, 4)], [(0, 2)], [(0, 1), (2, 3)]]
    assert messages("tree", 5) == [("stream", pairs, 32) for pairs in [*up, *down]]


def test_halving_doubling_rounds_equal_messages_by_hand():
    """The fifth device folds its vector into the first, and four halve and double."""
    far, near = [(0, 2), (1, 3), (2, 0), (3, 1)], [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert messages("halving_doubling", 5) == [
        ("stream", [(4, 0)], 32),
        *[("pair", far, 16), ("pair", near, 8), ("pair", near, 8), ("pair", far, 16)],
        ("stream", [(0, 4)], 32),
    ]


def test_ring_of_two_is_a_pair():
    both = [(0, 1), (1, 0)]
    assert messages("ring", 2) == [("pair", both, 16), ("pair", both, 16)]
    assert {kind for kind, _, _ in messages("ring", 3)} == {"shift"}
    assert {kind for kind, _, _ in messages("psum", 2)} == {"stream"}


@pytest.mark.parametrize("p", DEVICES)
def test_two_shot_halves_connect_every_pair_once(p):
    pairs = [pairs for _, pairs, _ in messages("two_shot", p)]
    every = sorted((a, b) for a in range(p) for b in range(p) if a != b)
    for half in pairs[: p - 1], pairs[p - 1 :]:
        assert sorted(itertools.chain.from_iterable(half)) == every


@pytest.mark.parametrize("algorithm", COST_MODELS)
@pytest.mark.parametrize("p", DEVICES)
def test_no_device_sends_or_receives_twice_in_a_round(algorithm, p):
    for _, pairs, _ in messages(algorithm, p):
        for ranks in zip(*pairs, strict=True):
            assert len(set(ranks)) == len(ranks)


@pytest.mark.parametrize("algorithm", sorted(COST_MODELS.keys() - {"two_shot"}))
@pytest.mark.parametrize("p", DEVICES)
def test_all_devices_know_all_contributions_as_early_as_possible(algorithm, p):
    """A message carries all that its sender knows, of itself and from others."""
    pairs = [pairs for _, pairs, _ in messages(algorithm, p)]
    known = [{rank} for rank in range(p)]
    complete = []
    for each in pairs:
        told = [(receiver, set(known[sender])) for sender, receiver in each]
        for receiver, what in told:
            known[receiver] |= what
        complete.append(all(len(ranks) == p for ranks in known))
    # The first half of these passes on pieces of all devices. Other algorithms need all
    # rounds.
    halves = algorithm in ("psum", "ring")
    halves |= algorithm == "halving_doubling" and p & (p - 1) == 0
    needed = len(pairs) // 2 if halves else len(pairs)
    assert complete == [i + 1 >= needed for i in range(len(pairs))]


def test_piece_is_padded_to_whole_blocks():
    """10 elements in 3 pieces are 4 each, or a block of 8 with its scale."""
    assert Chunk.of(10, 3, None) == Chunk(bytes=16, coded=0, payload=16)
    assert Chunk.of(10, 3, codecs.int8(8)) == Chunk(bytes=32, coded=32, payload=12)
