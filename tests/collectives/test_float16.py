"""Tests that a sum of float16 may exceed float16, whichever algorithm adds it up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._internal.mesh import on_mesh
from pipejax.collectives import Layout, Summands

from ..grid import grid
from ..helpers import assert_bits_equal
from .cases import ALGORITHMS

CODECS = {"none": None, "float16": codecs.cast("float16")}
# `psum` sums payloads without decoding them.
WAYS = [(a, c) for a in ALGORITHMS for c in CODECS if (a, c) != ("psum", "float16")]
N = 24


def sums(all_reduce, x, *, hosts=None):
    """Returns the sum of the rows of `x` on every device, [p, n]."""
    axis_name = "data" if hosts is None else ("host", "device")
    mesh = pj.data_mesh(len(x), axis_name=axis_name, hosts=hosts)

    def local(x):
        arrays = Summands((x[0],), (x[0, :3],))
        stages = all_reduce(Layout.of(arrays), axis_name)
        (total,), (exact,) = collectives.run(stages, arrays)[0]
        assert exact.dtype == total.dtype
        return jnp.concatenate([total, exact])[None]

    own = P(axis_name)
    return np.asarray(jax.jit(on_mesh(local, mesh, own, own))(x))


def values(devices, dtype):
    """Returns numbers from 16,384 to 16,960 that float16 holds exactly."""
    rng = np.random.default_rng(0)
    return jnp.asarray(64.0 * rng.integers(256, 266, (devices, N)), dtype)


@grid(1, way=WAYS, dtype=["float16", "float32"], devices=[4, 6, 8])
def test_sum_may_exceed_the_range_of_float16(way, dtype, devices):
    name, codec = way
    codec, hosts = CODECS[codec], 2 if name == "hierarchical" else None
    x = values(devices, dtype)
    found = sums(ALGORITHMS[name](codec), x, hosts=hosts)
    wanted = np.asarray(x, np.float32).sum(axis=0)
    assert wanted.min() > 65504
    wanted = np.concatenate([wanted, wanted[:3]])
    # Partial sums are rounded to the 11 bits of float16, in up to 7 hops.
    rtol = 0 if codec is None and dtype == "float32" else 8 * 2.0**-11
    for row in found:
        assert row.dtype == np.float32
        np.testing.assert_allclose(row, wanted, rtol=rtol)


def test_hierarchical_levels_share_one_headroom():
    """A sum over the 4 devices of a host is past float16 before hosts are added up."""
    codec, x = codecs.cast("float16"), values(8, "float32")
    both = collectives.hierarchical(
        collectives.two_shot(codec), collectives.two_shot(codec)
    )
    found = sums(both, x, hosts=2)
    wanted = np.asarray(x).sum(axis=0)
    np.testing.assert_allclose(found[0, :N], wanted, rtol=4 * 2.0**-11)


@pytest.mark.parametrize("threshold", [0, 1 << 20])
def test_psum_of_float16_equals_a_sum_by_hand(threshold):
    """The sum of float16 arrays has the same bits as a sum that is written by hand."""
    p = 4
    x = jnp.asarray(np.random.default_rng(0).normal(size=(p, N)), jnp.float16)
    found = sums(collectives.psum(combine_threshold_bytes=threshold), x)
    rows, total = np.asarray(x) / np.float16(p), np.zeros(N, np.float16)
    for row in rows:
        total = total + row
    assert total.dtype == np.float16
    wanted = np.float32(p) * total
    assert_bits_equal(found[0], np.concatenate([wanted, wanted[:3]]))


def test_psum_of_float16_sends_two_bytes_an_element():
    arrays = Summands((jnp.zeros(N, jnp.float16),))

    def count():
        stages = collectives.psum()(Layout.of(arrays), "data")
        (transfer,) = stages.transfers
        assert transfer.bytes == 2 * N

    jax.vmap(count, axis_name="data", axis_size=4)()
