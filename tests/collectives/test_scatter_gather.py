"""Tests each half of an all-reduce alone: which device has which piece in between."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import collectives
from pipejax._internal.mesh import on_mesh
from pipejax.collectives import Layout, Summands
from pipejax.collectives._sites import Cut, Parts
from pipejax.collectives._stages import local, run

from ..grid import grid

HALVES = ["ring", "two_shot", "halving_doubling"]


def half(algorithm, devices, which):
    """Compiles one half for 8 float32 numbers; returns it and the number of pieces."""
    all_reduce = getattr(collectives, algorithm)()
    pieces = all_reduce.pieces(devices)
    cut = Cut.of(Layout.of_shapes(((8,),)), pieces, 1)

    def scatter(row):
        stages = local(cut.rows) + all_reduce.reduce_scatter(cut, "data")
        return run(stages, Summands((row[0],)))[0].coded[None]

    def gather(piece):
        stages = all_reduce.all_gather(cut, "data")
        return run(stages, Parts(piece[0], piece[0, :0]))[0].coded[None]

    program = {"scatter": scatter, "gather": gather}[which]
    mesh = pj.data_mesh(devices)
    return jax.jit(on_mesh(program, mesh, P("data"), P("data"))), pieces


@grid(1, algorithm=HALVES, devices=[2, 3, 4])
def test_device_i_has_piece_i_of_the_sum(algorithm, devices):
    """Under halving-doubling, devices beyond the power of two have no piece."""
    program, pieces = half(algorithm, devices, "scatter")
    rows = np.outer(np.arange(1, devices + 1), np.arange(8)).astype(np.float32)
    padded = np.pad(rows.sum(axis=0), (0, -8 % pieces)).reshape(pieces, -1)
    np.testing.assert_array_equal(program(rows)[:pieces], padded)


@grid(1, algorithm=HALVES, devices=[2, 3, 4])
def test_all_devices_receive_all_pieces_in_order(algorithm, devices):
    """Devices that own no piece receive all pieces too."""
    program, pieces = half(algorithm, devices, "gather")
    length = -(-8 // pieces)
    own = np.arange(devices * length, dtype=np.float32).reshape(devices, length)
    wanted = np.tile(own[None, :pieces], (devices, 1, 1))
    np.testing.assert_array_equal(program(own), wanted)


def test_each_algorithm_has_its_number_of_pieces():
    counts = {
        name: [getattr(collectives, name)().pieces(p) for p in (1, 3, 4, 6, 8)]
        for name in HALVES
    }
    assert counts == {
        "ring": [1, 3, 4, 6, 8],
        "two_shot": [1, 3, 4, 6, 8],
        "halving_doubling": [1, 2, 4, 4, 8],
    }
