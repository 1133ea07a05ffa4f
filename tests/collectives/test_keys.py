"""Random codecs draw other numbers at every place; those added up unread, alike."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax.mesh import on_mesh

KEY = jax.random.key(0)
ROUNDED = codecs.stochastic(codecs.int8(8), KEY)
AXES = ("host", "device")


def keys(all_reduce, axis_name="data", hosts=None):
    """Of every device and place, as rows."""
    layout = collectives.Layout.of_shapes(((64,),))
    mesh = pj.data_mesh(4, axis_name=axis_name, hosts=hosts)

    def init():
        states = all_reduce(layout, axis_name).init()
        return jax.tree.map(lambda x: x[None], states)

    found = jax.jit(on_mesh(init, mesh, (), P(axis_name)))()
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(found)]
    return [tuple(row) for leaf in leaves for row in leaf.reshape(-1, leaf.shape[-1])]


@pytest.mark.parametrize("name", ["two_shot", "ring", "halving_doubling", "tree"])
def test_every_place_has_its_own(name):
    found = keys(getattr(collectives, name)(ROUNDED))
    assert len(found) == len(set(found)) >= 8


def test_every_place_of_both_levels_has_its_own():
    both = collectives.two_shot(ROUNDED)
    found = keys(collectives.hierarchical(both, both), AXES, hosts=2)
    # Of 4 devices, at either level: one for each of 2 pieces, and one for its sum.
    assert len(found) == len(set(found)) == 4 * 2 * 3


def test_what_is_added_up_unread_is_drawn_alike():
    found = keys(collectives.psum(codecs.random_k(0.1, KEY)))
    assert len(found) == 4
    assert len(set(found)) == 1
