"""Tests the two halves of an all-reduce against the all-reduce itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs
from pipejax.collectives import (
    Layout,
    ReduceScatterAllGather,
    Summands,
    halving_doubling,
    psum,
    ring,
    run,
    two_shot,
)
from pipejax.overlap import NoCommunication, inspect

from ..helpers import assert_bits_equal

DEVICES = 4
SHAPES, CUTS = ((8, 3), (3, 8), (5,), (2, 4, 3)), (0, 1, None, 1)
NATIVE = dataclasses.replace(psum(), scatters=True)


def summands(dtype=np.float32):
    """Returns different arrays for each device, concatenated along the first axis."""
    rng = np.random.default_rng(0)
    coded = (rng.normal(size=(DEVICES * s[0], *s[1:])).astype(dtype) for s in SHAPES)
    exact = np.arange(2 * DEVICES, dtype=np.float32)
    return Summands(tuple(coded), (exact,))


def on_devices(local, out):
    """Returns a function of the arrays of each device as a program of all devices."""
    mesh = pj.data_mesh(DEVICES)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P("data"), out_specs=out, check_vma=False
    )
    return jax.jit(mapped)


def summed(all_reduce, arrays):
    def local(arrays):
        return run(all_reduce(Layout.of(arrays), "data"), arrays)[0]

    return on_devices(local, P("data"))(arrays)


@pytest.mark.parametrize(
    "all_reduce",
    [psum(), NATIVE, two_shot(), ring(), halving_doubling()],
    ids=["psum", "native", "two_shot", "ring", "halving_doubling"],
)
def test_reduce_scatter_and_all_gather_sum(all_reduce):
    found = summed(ReduceScatterAllGather(all_reduce, CUTS), summands())
    wanted = summed(psum(), summands())
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_sums_of_two_shot_have_the_same_bits():
    found = summed(ReduceScatterAllGather(two_shot(), CUTS), summands())
    wanted = summed(two_shot(), summands())
    assert_bits_equal(found.coded, wanted.coded)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("all_reduce", [psum(), NATIVE], ids=["rows", "native"])
def test_sums_of_narrow_dtypes_are_close_and_in_their_dtype(all_reduce, dtype):
    arrays = summands(dtype)
    found = summed(ReduceScatterAllGather(all_reduce, CUTS), arrays).coded
    for total, own in zip(found, arrays.coded, strict=True):
        wanted = np.float32(own).reshape(DEVICES, -1).sum(0)
        assert total.dtype == (jnp.float32 if dtype == jnp.float16 else dtype)
        got = np.float32(total).reshape(DEVICES, -1)[0]
        np.testing.assert_allclose(got, wanted, atol=0.05)


def test_codec_encodes_the_first_half_alone():
    arrays = summands()
    found = summed(ReduceScatterAllGather(two_shot(codecs.int8(8)), CUTS), arrays)
    wanted = summed(psum(), arrays)
    for a, b, cut in zip(found.coded, wanted.coded, CUTS, strict=True):
        error = np.abs(np.asarray(a - b)).max()
        assert error == 0 if cut is None else 0 < error < 0.1
    assert_bits_equal(found.exact, wanted.exact)


@pytest.mark.parametrize("all_reduce", [psum(), NATIVE], ids=["rows", "native"])
def test_compiled_program_sends_the_transfers_of_the_stages(all_reduce):
    halved, said = ReduceScatterAllGather(all_reduce, CUTS), []

    def local(arrays):
        stages = halved(Layout.of(arrays), "data")
        said[:] = stages.transfers
        return run(stages, arrays)[0]

    program = on_devices(local, P("data"))
    report = inspect(program.lower(summands()).compile())
    sent = sum(x.times * x.wire_bytes for x in report.collectives)
    assert sent == sum(x.wire_bytes for x in said)


def test_devices_without_communication_keep_their_own_pieces():
    halved = ReduceScatterAllGather(NoCommunication(), CUTS)

    def local(arrays):
        stages = halved(Layout.of(arrays), "data")
        assert not stages.transfers
        return run(stages, arrays)[0]

    arrays = summands()
    found = on_devices(local, P("data"))(arrays)
    assert_bits_equal(found.exact, arrays.exact)
    assert_bits_equal(found.coded[2], arrays.coded[2])
    for rank in range(DEVICES):
        whole = found.coded[0][8 * rank : 8 * rank + 8]
        own = arrays.coded[0][8 * rank + 2 * rank : 8 * rank + 2 * rank + 2]
        np.testing.assert_array_equal(whole, np.tile(own, (DEVICES, 1)))
