"""Tests the phases of an all-reduce: their names, and that they are all of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._internal.mesh import on_mesh
from pipejax.collectives import Layout, Summands, phases
from pipejax.collectives._stages import local

from ..grid import grid

INT8 = codecs.int8()
LAYOUT = Layout.of_shapes(((1000,),))


def found(all_reduce, p=4):
    """Returns the names of an all-reduce's phases on p devices."""
    seen = []

    def own():
        seen.extend(phase.name for phase in phases(all_reduce(LAYOUT, "data")))

    jax.eval_shape(on_mesh(own, pj.data_mesh(p), (), P()))
    return seen


def test_psum_has_three_phases():
    """psum joins the arrays in a vector first, and takes them apart at the end."""
    assert found(collectives.psum()) == ["encode", "first", "decode"]


def test_two_shot_encodes_again_between_its_halves():
    between = ["reduction", "encode"]  # the sum is decoded, added and encoded again
    halves = ["encode", "first", *between, "second", "decode"]
    assert found(collectives.two_shot(INT8)) == halves


@grid(1, codec=[None, INT8], algorithm=["ring", "halving_doubling", "tree"])
def test_both_halves_have_as_many_exchanges(algorithm, codec):
    p = 4
    seen = found(getattr(collectives, algorithm)(codec), p)
    hops = p - 1 if algorithm == "ring" else 2
    assert seen.count("first") == seen.count("second") == hops
    # Every hop of the first half encodes, and so does the owner or the root at the end.
    encoded = [i for i, phase in enumerate(seen) if phase == "encode"]
    assert len([i for i in encoded if i > seen.index("first")]) == hops
    assert seen[0] == "encode"
    assert seen[-1] == "decode"


def test_linear_codec_has_two_rounds():
    """A linear codec has two rounds: the first exchanges P, the second Q."""
    codec = codecs.error_feedback(codecs.power_sgd(1, jax.random.key(0)))
    seen = found(collectives.psum(codec))
    assert [p for p in seen if p != "reduction"] == [
        *("encode", "first", "encode", "second", "decode"),
    ]


def test_local_work_without_a_collective_is_refused():
    with pytest.raises(ValueError, match=r"`stages` must have a collective, got only"):
        phases(local(lambda x: x))


@pytest.mark.parametrize("algorithm", ["psum", "ring", "two_shot", "tree"])
def test_phases_in_order_equal_the_all_reduce(algorithm):
    """All phases in order give the bits of `collectives.run`."""
    all_reduce = getattr(collectives, algorithm)()

    def own(x):
        summands = Summands((x,))
        stages = all_reduce(LAYOUT, "data")
        carry = summands, stages.init()
        for phase in phases(stages):
            carry = phase.run(carry)
        whole, _ = collectives.run(stages, summands)
        return carry[0].coded[0], whole.coded[0]

    x = jnp.sin(jnp.arange(4 * 1000, dtype=jnp.float32))
    mapped = on_mesh(own, pj.data_mesh(4), (P("data"),), P("data"))
    by_phases, whole = jax.jit(mapped)(x)
    np.testing.assert_array_equal(by_phases, whole)
    assert np.allclose(whole[:1000], np.asarray(x).reshape(4, 1000).sum(0), atol=1e-5)
