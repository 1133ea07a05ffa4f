"""Tests the sum of messages over devices, and whether it may be applied."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax.mesh import on_mesh
from pipejax.message import (
    Message,
    Passengers,
    Reduced,
    codec_states,
    layout_of,
    message_of,
    reduced,
    summands,
)

DEVICES = 4


def message(factor=1.0, weight=None, bad=0.0):
    """Returns a message with gradients of two dtypes, a change, a loss and a metric."""
    return Message(
        gradients={
            "b": jnp.full(3, factor, jnp.bfloat16),
            "w": factor * jnp.linspace(0.1, 0.9, 6).reshape(2, 3).at[1, 2].add(bad),
        },
        changes={"mean": jnp.full(2, 10 * factor), "count": None},
        passengers=Passengers.of(
            jnp.float32(factor),
            {"seen": jnp.float32(2 * factor)},
            None if weight is None else jnp.float32(weight),
        ),
    )


def test_what_may_be_compressed_and_what_stays_exact():
    """Gradients may be compressed, but changes and passengers stay exact."""
    whole = message(weight=5)
    arrays = summands(whole)
    assert [x.shape for x in arrays.coded] == [(3,), (2, 3)]
    assert [x.shape for x in arrays.exact] == [(2,), (3,)]
    back = message_of(arrays, whole)
    assert jax.tree.structure(back) == jax.tree.structure(whole)
    assert back.gradients["w"] is arrays.coded[1]
    assert back.weight == 5
    layout = layout_of(jax.eval_shape(lambda: whole))
    assert (layout.coded_size, layout.exact_size) == (9, 5)


@pytest.mark.parametrize(
    ("arrived", "weight", "bad"),
    list(itertools.product([True, False], [None, 0, 3], [0.0, np.nan, np.inf])),
)
def test_counts_and_usable(arrived, weight, bad):
    """A sum counts if it has examples, and is usable if it also is finite."""
    found = Reduced.of(message(1.0, weight, bad), jnp.array(arrived))
    counts = arrived and weight != 0
    assert bool(found.counts) == counts
    assert bool(found.finite) == np.isfinite(bad)
    assert bool(found.usable) == (counts and np.isfinite(bad))
    kept = found.settled({"e": jnp.ones(2)}, {"e": jnp.zeros(2)})
    np.testing.assert_array_equal(kept["e"], [float(found.usable)] * 2)


def test_finite_means_gradients_and_changes():
    """A loss of NaN leaves a sum usable, and a change of NaN does not."""
    whole, arrived = message(), jnp.array(True)
    nan = jnp.float32(np.nan)
    loss = whole._replace(passengers=Passengers.of(nan, {}))
    assert Reduced.of(loss, arrived).finite
    changes = whole._replace(changes={"mean": jnp.array([1, nan]), "count": None})
    assert not Reduced.of(changes, arrived).finite
    assert Reduced.of(Message({}), arrived).finite


@pytest.mark.parametrize("bad", [0.0, np.nan])
def test_summed_over_devices(bad):
    """Device i sends 10^i. Residuals stay as they are if the sum is not finite."""
    all_reduce = collectives.two_shot(codecs.error_feedback(codecs.int8(8)))

    def local(ranks):
        own = message(10.0 ** ranks[0], bad=jnp.where(ranks[0] == 2, bad, 0))
        before = codec_states(own, all_reduce, "data")
        found, after = reduced(own, before, jnp.array(True), all_reduce, "data")
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
    assert np.asarray(changed).all() == np.isfinite(bad)
    if np.isfinite(bad):
        # There are two roundings of half a level, which is 1111 / 127, and one to
        # bfloat16.
        found = np.asarray(gradient, np.float32)
        assert (found == found[0]).all()
        assert np.abs(found - 1111).max() < 1111 / 127 + 1111 / 256
