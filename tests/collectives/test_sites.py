"""Tests the sites at which codecs encode: their keys, pieces and states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._internal.mesh import on_mesh
from pipejax.collectives import Layout, Summands
from pipejax.collectives._sites import Cut, Parts

from ..helpers import assert_bits_equal

KEY = jax.random.key(0)
ROUNDED = codecs.stochastic(codecs.int8(8), KEY)
AXES = ("host", "device")


def keys(all_reduce, axis_name="data", hosts=None, part=""):
    """Returns the keys of every device and place whose name begins with `part`."""
    layout = collectives.Layout.of_shapes(((8, 8),))
    mesh = pj.data_mesh(4, axis_name=axis_name, hosts=hosts)

    def init():
        states = all_reduce(layout, axis_name).init()
        own = {name: x for name, x in states.items() if name.startswith(part)}
        return jax.tree.map(lambda x: x[None], own)

    found = jax.jit(on_mesh(init, mesh, (), P(axis_name)))()
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(found)]
    return [tuple(row) for leaf in leaves for row in leaf.reshape(-1, leaf.shape[-1])]


@pytest.mark.parametrize("name", ["two_shot", "ring", "halving_doubling", "tree"])
def test_key_differs_at_every_place(name):
    found = keys(getattr(collectives, name)(ROUNDED))
    assert len(found) == len(set(found)) >= 8


def test_key_differs_at_every_place_of_both_levels():
    both = collectives.two_shot(ROUNDED)
    found = keys(collectives.hierarchical(both, both), AXES, hosts=2)
    # On each of 4 devices and at either level, there is a key for each of 2 pieces and
    # one for the sum. In the gather inside hosts, those of both hosts are the same.
    assert len(found) == 4 * 2 * 3
    assert len(set(found)) == 4 * 2 * 3 - 2


def test_key_differs_in_every_round_and_phase():
    two_shot = collectives.two_shot(ROUNDED)
    low_rank = codecs.error_feedback(codecs.power_sgd(1, KEY))
    rounds = keys(collectives.in_rounds(low_rank, two_shot), part="round ")
    schedule = collectives.scheduled([two_shot, two_shot], [3])
    phases = [key for each in schedule.phases for key in keys(each)]
    # On each of 4 devices, there is a key for each of 4 pieces and one for the sum.
    for found in (rounds, phases):
        assert len(found) == len(set(found)) == 2 * 4 * (4 + 1)


def test_vector_is_cut_into_equal_pieces_of_whole_blocks():
    """10 numbers in 3 pieces and blocks of 2 take 4 each, with zeros at the end.

    Each piece also has one of the 2 exact numbers, and the last piece a zero.
    """
    layout = Layout.of_shapes(((2, 3), (4,)), exact=2)
    cut = Cut.of(layout, 3, 2)
    assert (cut.coded, cut.exact) == (4, 1)
    numbers = jnp.arange(10, dtype="float32")
    coded = (numbers[:6].reshape(2, 3), numbers[6:])
    summands = Summands(coded, (jnp.float32([-1, -2]),))
    rows = cut.rows(summands)
    assert_bits_equal(
        rows.coded, np.float32([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]])
    )
    assert_bits_equal(rows.exact, np.float32([[-1], [-2], [0]]))
    assert_bits_equal(cut.arrays(rows), summands)


def test_pieces_are_no_shorter_than_a_block():
    assert Cut.of(Layout.of_shapes(((5,),)), 3, 8).coded == 8
    assert Cut.of(Layout.of_shapes((), exact=4), 3, 8)[2:] == (8, 2)


def on_one_device(local):
    """Returns what `local` returns where "data" is an axis of one device."""
    rows = jax.vmap(local, axis_name="data", axis_size=1)()
    return jax.tree.map(lambda x: x[0], rows)


def test_exact_part_follows_the_codes_in_the_payload():
    """The payload has 8 codes and a scale of 4 bytes, then the bits of a float32."""
    cut = Cut.of(Layout.of_shapes(((8,),), exact=1), 1, 8)
    parts = Parts(jnp.float32([127, 1, 2, 3, 4, 5, 6, 7]), jnp.float32([1 / 3]))

    def local():
        site = cut.site("up", codecs.int8(8), "data")
        payload, states = site.encode(parts, {})
        assert states == {}
        assert site.bytes == payload.nbytes == 8 + 4 + 4
        assert cut.site("up", codecs.int8(8), "data", rows=3).bytes == 3 * 16
        return payload, site.decode(payload)

    payload, decoded = on_one_device(local)
    assert np.asarray(payload[12:]).tobytes() == np.float32(1 / 3).tobytes()
    assert_bits_equal(decoded, parts)


@pytest.mark.parametrize("sends", [True, False])
def test_state_stays_on_a_device_without_sending(sends):
    """The residual of 2.5 is 0.5 on a device that sends, and stays 0 on others."""
    cut = Cut.of(Layout.of_shapes(((8,),)), 1, 8)
    codec = codecs.error_feedback(codecs.int8(8))
    x = jnp.float32([127, 2.5, 0, 0, 0, 0, 0, 0])
    parts = Parts(x, jnp.zeros(0, jnp.float32))

    def local():
        states = {"up": codec.init(8, jnp.uint32(0)), "down": jnp.float32([3])}
        site = cut.site("up", codec, "data")
        return site.encode(parts, states, where=jnp.bool_(sends))[1]

    after = on_one_device(local)
    wanted = np.float32([0, 0.5 * sends, 0, 0, 0, 0, 0, 0])
    assert_bits_equal(after["up"].residual, wanted)
    assert_bits_equal(after["down"], np.float32([3]))
