"""Tests the mean over devices as a transformation: what it sends and refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives, transforms
from pipejax._internal.mesh import on_mesh

DEVICES = 4


def mean_of(tx, gradients):
    """Returns every device's update. Device i has row i of `gradients`."""

    def local(rows):
        updates, _ = tx.update(rows[0], tx.init(rows[0]))
        return updates[None]

    mapped = on_mesh(local, pj.data_mesh(DEVICES), (P("data"),), P("data"))
    return np.asarray(jax.jit(mapped)(gradients))


@pytest.mark.parametrize(
    "algorithm", [collectives.psum, collectives.ring, collectives.two_shot]
)
def test_rank_coded_values(algorithm):
    """Device i sends 1, 10, 100 or 1000: the mean shows which devices it includes."""
    rows = jnp.outer(10.0 ** jnp.arange(DEVICES), jnp.arange(1.0, 6.0))
    found = mean_of(transforms.all_reduce_mean("data", algorithm), rows)
    wanted = np.float32([1111 * j / DEVICES for j in range(1, 6)])
    np.testing.assert_array_equal(found, np.tile(wanted, (DEVICES, 1)))


def test_the_codec_is_on_the_wire():
    """The algorithm gets the codec: two collectives of 8 bits, each with a rounding."""
    tx = transforms.all_reduce_mean("data", collectives.two_shot, codecs.int8(8))
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(DEVICES, 16)))
    found, exact = mean_of(tx, rows), np.asarray(rows).mean(axis=0)
    assert (found == found[0]).all()
    assert not np.array_equal(found[0], exact)
    # There are 127 levels on either side, and half a level is lost for each device's
    # own vector and half for the sum.
    largest = np.abs(rows).max() + np.abs(exact).max()
    assert np.abs(found[0] - exact).max() < 0.51 / 127 * largest


def test_an_algorithm_that_is_called_already():
    with pytest.raises(
        ValueError, match=r"`algorithm` must be .* not yet called.*Ring"
    ):
        transforms.all_reduce_mean("data", collectives.ring())
