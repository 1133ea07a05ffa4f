"""Tests the backend's sums of the rounds of a linear codec."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._internal.mesh import on_mesh
from pipejax.collectives import Layout, Summands, run

from .cases import KEY
from .test_sites import keys


@pytest.mark.parametrize(
    ("codec", "numbers"),
    [
        # The first round sends P of an 8 x 12 matrix; the second Q, the vector of 4 and
        # the exact part.
        (codecs.power_sgd(1, KEY), [8, 12 + 4 + 3]),
        # P of 8 elements is padded to the length of Q.
        (codecs.acp_sgd(1, KEY), [12 + 4 + 3]),
        (codecs.random_k(10, KEY, scaled=False), [10 + 3]),
    ],
)
def test_exact_parts_travel_in_the_last_round(codec, numbers):
    layout = Layout.of_shapes(((8, 12), (4,)), exact=3)
    found = []

    def local():
        all_reduce = collectives.psum(codecs.error_feedback(codec))
        found.extend(all_reduce(layout, "data").transfers)
        return jnp.zeros(1)

    jax.eval_shape(on_mesh(local, pj.data_mesh(2), (), P("data")))
    assert [x.bytes for x in found] == [4 * count for count in numbers]
    assert {(x.kind, x.devices) for x in found} == {("all-reduce", 2)}


def test_random_k_uses_the_same_key_on_all_devices():
    found = keys(collectives.psum(codecs.random_k(0.1, KEY)))
    assert len(found) == 4
    assert len(set(found)) == 1


def test_rounds_inside_levels_have_the_headroom_of_all_devices():
    """8 devices with 20,000 for each drawn one: in float16, a sum would not fit."""
    inner = pj.collectives.two_shot(pj.codecs.cast("float16"))
    coded = pj.codecs.random_k(0.5, jax.random.key(0))
    levels = pj.collectives.hierarchical(outer=pj.collectives.in_rounds(coded, inner))

    def total(x):
        axes = ("host", "device")
        found, _ = run(levels(Layout.of(Summands((x,))), axes), Summands((x,)))
        return found.coded[0]

    within = jax.vmap(total, axis_name="device")
    found = jax.vmap(within, axis_name="host")(jnp.full((2, 4, 64), 10_000.0))
    assert jnp.isfinite(found).all()
    assert set(np.unique(found)) == {0.0, 160_000.0}
