"""Tests several all-reduces side by side, against each of them alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs
from pipejax._internal.mesh import on_mesh
from pipejax.collectives import Layout, Summands, psum, run, tree, two_shot
from pipejax.collectives._grouped import Grouped

from ..helpers import assert_bits_equal

DEVICES, DATA = 4, "data"
SHAPES = ((3, 5), (7,), (2, 4), (1,))


def summands():
    """Returns different arrays for each of the devices, as rows."""
    rng = np.random.default_rng(0)
    coded = tuple(rng.normal(size=(DEVICES, *x)).astype(np.float32) for x in SHAPES)
    return Summands(coded, (np.arange(DEVICES, dtype=np.float32).reshape(-1, 1),))


def summed(all_reduce, arrays):
    """Returns the sums, and the states of codecs after them."""

    def local(arrays):
        own = jax.tree.map(lambda x: x[0], arrays)
        found = run(all_reduce(Layout.of(own), DATA), own)
        return jax.tree.map(lambda x: x[None], found)

    mapped = on_mesh(local, pj.data_mesh(DEVICES), P(DATA), P(DATA))
    return jax.jit(mapped)(arrays)


def stages(all_reduce):
    found = []

    def local(arrays):
        found.append(all_reduce(Layout.of(arrays), DATA))
        return arrays

    jax.vmap(local, axis_name=DATA)(summands())
    return found[0]


@pytest.mark.parametrize(
    "all_reduce",
    [
        psum(),
        two_shot(codecs.error_feedback(codecs.int8(8))),
        pytest.param(
            tree(codecs.stochastic(codecs.int8(8), jax.random.key(0))),
            marks=pytest.mark.full,
        ),
        pytest.param(
            psum(codecs.error_feedback(codecs.power_sgd(1, jax.random.key(1)))),
            marks=pytest.mark.full,
        ),
    ],
    ids=["psum", "two_shot", "tree", "power_sgd"],
)
def test_each_set_is_summed_like_a_set_alone(all_reduce):
    """Codecs that draw random numbers draw others for another set."""
    sets, given = ((0, 3), (2, 1)), summands()
    got, states = summed(Grouped(all_reduce, sets), given)
    first, kept = summed(
        all_reduce, Summands((given.coded[0], given.coded[3]), given.exact)
    )
    assert_bits_equal(
        (got.coded[0], got.coded[3], got.exact), (*first.coded, first.exact)
    )
    assert_bits_equal({k: states[k] for k in kept}, kept)
    second, others = summed(all_reduce, Summands((given.coded[2], given.coded[1])))
    if all_reduce in (psum(), two_shot(codecs.error_feedback(codecs.int8(8)))):
        assert_bits_equal((got.coded[2], got.coded[1]), second.coded)
    assert states.keys() == kept.keys() | {f"1 {name}" for name in others}


def test_sets_draw_different_numbers():
    drawn = tree(codecs.stochastic(codecs.int8(8), jax.random.key(0)))
    _, states = summed(Grouped(drawn, ((0, 3), (2, 1))), summands())
    keys = [np.asarray(states[name]).tolist() for name in ("up", "1 up")]
    assert keys[0] != keys[1]


def test_sets_share_their_stages():
    one, two = stages(two_shot()), stages(Grouped(two_shot(), ((0,), (1, 2), (3,))))
    assert len(two.stages) == len(one.stages) == 2
    kinds = ["all-to-all"] * 3 + ["all-gather"] * 3
    assert [transfer.kind for transfer in two.transfers] == kinds


def test_single_set_has_the_bits_of_the_plain_algorithm():
    int8 = two_shot(codecs.int8(8))
    every = tuple(range(len(SHAPES)))
    assert_bits_equal(*(summed(x, summands()) for x in (int8, Grouped(int8, (every,)))))


def test_vectors_of_different_sets_are_encoded_apart():
    """A large array does not spoil the scale of a small one in another set."""
    large, small = jnp.full((DEVICES, 4), 1e6), jnp.full((DEVICES, 4), 1.0)
    int8, given = two_shot(codecs.int8(16)), Summands((large, small))
    together, _ = summed(int8, given)
    apart, _ = summed(Grouped(int8, ((0,), (1,))), given)
    assert together.coded[1].tolist() == np.zeros((DEVICES, 4)).tolist()
    np.testing.assert_allclose(apart.coded[1], DEVICES * small, rtol=0.02)
