"""Tests the exchange of a message whose sum every device needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._core.message import Message, averaging, codec_states
from pipejax._internal.mesh import on_mesh

from .example import message

DEVICES = 4


@pytest.mark.parametrize(("bad", "valid"), [(0.0, True), (np.nan, True), (0.0, False)])
def test_exchange_sums_over_devices_and_keeps_residuals_of_nan(bad, valid):
    """Device i sends 10^i. Residuals stay as they are if the sum is not used."""
    all_reduce = collectives.two_shot(codecs.error_feedback(codecs.int8(8)))

    def local(ranks):
        own = message(10.0 ** ranks[0], bad=jnp.where(ranks[0] == 2, bad, 0))
        before = codec_states(own, all_reduce, "data")
        exchange = averaging(own, jnp.array(valid), all_reduce, "data")
        found, after = exchange.run(before)
        changed = [
            jnp.any(x != y)
            for x, y in zip(
                jax.tree.leaves(before), jax.tree.leaves(after), strict=True
            )
        ]
        total = found.sum
        return jax.tree.map(
            lambda x: x[None],
            (total.changes, total.passengers.values, total.gradients["b"]),
        ), (found.finite[None], jnp.stack(changed).any()[None])

    mapped = on_mesh(local, pj.data_mesh(DEVICES), (P("data"),), P("data"))
    arrays, (finite, changed) = jax.jit(mapped)(jnp.arange(4.0))
    changes, passengers, gradient = arrays
    np.testing.assert_array_equal(changes["mean"], np.full((4, 2), 11110))
    np.testing.assert_array_equal(passengers, np.tile([1111, 2222], (4, 1)))
    assert gradient.dtype == jnp.bfloat16
    assert (np.asarray(finite) == np.isfinite(bad)).all()
    # Every device has a residual of its own gradient or of its piece of the sum.
    assert np.asarray(changed).all() == (valid and np.isfinite(bad))
    if np.isfinite(bad):
        # There are two roundings of half a level, which is 1111 / 127, and one to
        # bfloat16.
        found = np.asarray(gradient, np.float32)
        assert (found == found[0]).all()
        assert np.abs(found - 1111).max() < 1111 / 127 + 1111 / 256


def test_residuals_stay_finite_if_a_sum_overflows():
    """Two devices send the largest numbers that there are."""
    codec = codecs.error_feedback(codecs.int8(8))
    all_reduce = collectives.two_shot(codec)

    def local(large):
        own = Message({"w": large * jnp.linspace(0.9, 1.0, 16)})
        before = codec_states(own, all_reduce, "data")
        exchange = averaging(own, jnp.array(True), all_reduce, "data")
        found, after = exchange.run(before)
        return found.finite[None], after

    mapped = on_mesh(local, pj.data_mesh(2), (P("data"),), P("data"))
    finite, after = jax.jit(mapped)(jnp.full(2, 3e38))
    assert not np.asarray(finite).any()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))
    assert np.any(after["scatter"].residual)
    assert not np.any(after["gather"].residual)
