"""Tests the first half of an exchange: pieces of sums of arrays cut along any axis."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax.collectives import Layout, Summands, halving_doubling, run, two_shot
from pipejax.collectives._cut_scatter import (
    own_pieces,
    piece_forms,
    scatter_arrays,
    scatter_rows,
)

from ..helpers import assert_bits_equal

DEVICES = 4
SHAPES, CUTS = ((8, 3), (3, 8), (2, 4, 3)), (0, 1, 1)


def arrays():
    """Returns whole numbers that differ between devices, on a first axis of devices."""
    rng = np.random.default_rng(0)
    shapes = ((DEVICES, *shape) for shape in SHAPES)
    return tuple(rng.integers(-99, 99, shape).astype(np.float32) for shape in shapes)


def pieces(stages_of, values):
    """Returns the pieces of all devices, put together along the axes of the cuts."""

    def local(values):
        own = tuple(x[0] for x in values)
        return run(stages_of(Layout.of(Summands(own))), own)[0]

    out = tuple(P(*[None] * cut, "data") for cut in CUTS)
    program = jax.shard_map(
        local,
        mesh=pj.data_mesh(DEVICES),
        in_specs=P("data"),
        out_specs=out,
        check_vma=False,
    )
    return jax.jit(program)(values)


@pytest.mark.parametrize(
    "stages_of",
    [
        lambda layout: scatter_arrays(layout, CUTS, "data"),
        lambda layout: scatter_rows(two_shot(), layout, CUTS, "data"),
        lambda layout: scatter_rows(halving_doubling(), layout, CUTS, "data"),
    ],
    ids=["arrays", "rows", "rows of halving_doubling"],
)
def test_each_device_has_its_piece_of_the_sums(stages_of):
    """Sums of whole numbers are exact in any order."""
    values = arrays()
    found = pieces(stages_of, values)
    assert_bits_equal(found, tuple(x.sum(axis=0) for x in values))


def test_own_pieces_are_cut_from_the_own_arrays():
    values = arrays()
    found = pieces(lambda layout: own_pieces(CUTS, "data"), values)
    for whole, cut, own in zip(found, CUTS, values, strict=True):
        for rank, piece in enumerate(np.split(whole, DEVICES, cut)):
            wanted = np.split(own[rank], DEVICES, cut)[rank]
            np.testing.assert_array_equal(piece, wanted)


def test_piece_forms_divide_the_cut_axis():
    forms = [jax.ShapeDtypeStruct(shape, np.float16) for shape in ((8, 3), (5,))]
    found = piece_forms(forms, (0, None), DEVICES)
    assert [(x.shape, x.dtype) for x in found] == [((2, 3), "f2"), ((5,), "f2")]
