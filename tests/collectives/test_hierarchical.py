"""Tests what travels inside hosts and between them, and how often it is encoded."""

import jax
import optax
import pytest

import pipejax as pj
from pipejax import codecs
from pipejax.collectives import halving_doubling, hierarchical, ring, tree, two_shot

from ..helpers import assert_bits_equal, batches, init_params, loss_fn
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


@pytest.mark.parametrize("inner", [two_shot, ring, halving_doubling])
@pytest.mark.parametrize("kind", ["stochastic", "rotated"])
def test_random_inner_codec_leaves_all_hosts_alike(inner, kind):
    key = jax.random.key(0)
    codec = {
        "stochastic": lambda: codecs.stochastic(codecs.int8(8), key),
        "rotated": lambda: codecs.rotated(codecs.int8(8), key),
    }[kind]()
    mesh = pj.data_mesh(4, axis_name=("host", "device"), hosts=2)
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(0.1),
        mesh=mesh,
        axis_name=("host", "device"),
        all_reduce=hierarchical(inner=inner(codec)),
    )
    state = train.init(init_params())
    for batch in batches(2):
        state, _ = train.step(state, batch)
    state, _ = train.drain(state)
    for leaf in jax.tree.leaves(state.params):
        first, *others = (shard.data for shard in leaf.addressable_shards)
        for other in others:
            assert_bits_equal(first, other)
