"""Tests which arrays of a sharded model are summed together, and by whom."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs
from pipejax._internal.mesh import on_mesh
from pipejax.collectives import Layout, Sharded, Summands, psum, run, two_shot

from ..helpers import assert_bits_equal

SIZES = {"fsdp": 2, "tp": 2, "one": 1}


def layout(*shapes, exact=0):
    return Layout.of_shapes(shapes, exact=exact)


def test_arrays_split_over_the_same_axes_form_one_set():
    specs = (
        P("fsdp"),
        P(),
        P("tp", "fsdp"),
        P(None, "fsdp"),
        P("one"),
        P(("tp", "fsdp")),
    )
    found = Sharded(psum(), specs).of_one_device(SIZES)
    assert found.sets == ((0, 3), (1, 4), (2, 5))
    assert Sharded(psum(), ()).of_one_device(SIZES).sets == ((),)


def test_shard_has_its_part_of_each_axis():
    specs = (P("fsdp"), P(None, ("tp", "fsdp")), P("one", "tp"), P())
    whole = layout((4, 3), (2, 8), (3, 2), (5,), exact=6)
    found = Sharded(psum(), specs, (P("fsdp"),)).shard(whole, SIZES)
    assert found.shapes == ((2, 3), (2, 2), (3, 1), (5,))
    assert [x.shape for x in found.exact] == [(3,)]


@pytest.mark.parametrize(
    "codec", [pytest.param(None, marks=pytest.mark.full), codecs.int8(8)]
)
def test_two_groups_sum_their_shards_like_two_devices(codec):
    """Without a second group of devices, each device would sum the same shards."""
    mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
    rng = np.random.default_rng(0)
    split = rng.normal(size=(2, 6, 4)).astype(np.float32)
    whole = rng.normal(size=(2, 5)).astype(np.float32)
    specs = (P("fsdp"), P())

    def local(split, whole):
        arrays = Summands((split[0], whole[0]))
        stages = Sharded(two_shot(codec), specs)(Layout.of(arrays), "host")
        sums, _ = run(stages, arrays)
        return sums.coded

    program = jax.jit(on_mesh(local, mesh, P("host"), P(), "host"))
    got = program(split, whole)

    def alone(*arrays):
        def one(*arrays):
            given = Summands(arrays)
            return run(two_shot(codec)(Layout.of(given), "host"), given)[0].coded

        return [x[0] for x in jax.vmap(one, axis_name="host")(*arrays)]

    (upper,), (lower,) = alone(split[:, :3]), alone(split[:, 3:])
    assert_bits_equal(jax.device_get(got[0]), np.concatenate([upper, lower]))
    assert_bits_equal(jax.device_get(got[1]), np.asarray(alone(whole)[0]))
