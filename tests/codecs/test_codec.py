"""Tests a user's codec with four methods, and the defaults of the base class."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import collectives
from pipejax._internal.mesh import on_mesh
from pipejax.codecs import Codec


@dataclasses.dataclass(frozen=True)
class Whole(Codec):
    """Sends integers from -128 to 127 as one byte each."""

    def size(self, n):
        return n

    def encode(self, x, state):
        return jax.lax.bitcast_convert_type(x.astype(jnp.int8), jnp.uint8), state

    def decode(self, payload, n):
        return jax.lax.bitcast_convert_type(payload, jnp.int8).astype(jnp.float32)


def test_codec_with_three_methods_runs_in_a_ring():
    """All 3 devices get the exact sum of their rows of integers."""
    layout = collectives.Layout.of_shapes(((7,),))

    def local(rows):
        stages = collectives.ring(Whole())(layout, "data")
        assert all(x.bytes == 3 for x in stages.transfers)  # 7 elements in 3 pieces
        sums, states = collectives.run(stages, collectives.Summands((rows[0],)))
        assert states == {}
        return sums.coded[0][None]

    rows = np.arange(-10, 11, dtype=np.float32).reshape(3, 7)
    got = jax.jit(on_mesh(local, pj.data_mesh(3), P("data"), P("data")))(rows)
    np.testing.assert_array_equal(got, np.tile(rows.sum(axis=0), (3, 1)))


def test_defaults_suit_rounding_to_the_nearest():
    """The defaults: any length, and no state, feedback or linear rounds."""
    codec, x = Whole(), jnp.zeros(3)
    assert (codec.multiple, codec.rounds) == (1, 0)
    assert not codec.needs_feedback
    assert not codec.needs_leaves
    assert codec.init(3, jnp.uint32(0)) == ()
    assert codec.leaves(x) is x
    assert codec.of(((3,),), "float64") is codec


@pytest.mark.parametrize("missing", ["size", "encode", "decode"])
def test_codec_without_a_required_method_is_refused(missing):
    names = {"size", "encode", "decode"} - {missing}
    methods = {name: getattr(Whole, name) for name in names}
    with pytest.raises(TypeError, match=rf"abstract method.*{missing}"):
        type("Partial", (Codec,), methods)()
