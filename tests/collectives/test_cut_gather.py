"""Tests the second half of an exchange: whole arrays from the pieces of all devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax.collectives import run
from pipejax.collectives._cut_gather import gather_arrays, gather_words, repeat
from pipejax.collectives._cut_scatter import piece_forms

from ..helpers import assert_bits_equal

DEVICES = 4
CUTS = (0, 1, 1, 0)


def arrays():
    """Returns arrays of several widths, with numbers that arithmetic would change."""
    rng = np.random.default_rng(0)
    strange = np.array([np.nan, -0.0, np.inf, 1e-42] * 6, np.float32)
    return (
        strange.reshape(8, 3),
        jnp.asarray(rng.normal(size=(3, 8)), jnp.bfloat16),
        rng.integers(0, 256, (2, 4, 3)).astype(np.uint8),
        rng.integers(-9, 9, 4).astype(np.int32),
    )


def gathered(gather, values):
    """Returns what all devices make of their pieces."""
    forms = piece_forms(values, CUTS, DEVICES)

    def local(values):
        return run(gather(forms, CUTS, "data"), values)[0]

    program = jax.shard_map(
        local,
        mesh=pj.data_mesh(DEVICES),
        in_specs=(tuple(P(*[None] * cut, "data") for cut in CUTS),),
        out_specs=P(),
        check_vma=False,
    )
    return jax.jit(program)(values)


@pytest.mark.parametrize("gather", [gather_arrays, gather_words])
def test_gather_keeps_all_bits(gather):
    values = arrays()
    assert_bits_equal(gathered(gather, values), values)


def test_repeat_fills_all_pieces_with_the_own_piece():
    def local(x):
        forms = (jax.ShapeDtypeStruct(x.shape, x.dtype),)
        return run(repeat(forms, (0,), "data"), (x,))[0][0]

    mesh = pj.data_mesh(DEVICES)
    program = jax.shard_map(
        local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    found = jax.jit(program)(np.arange(4))
    assert found.tolist() == np.repeat(np.arange(4), DEVICES).tolist()
