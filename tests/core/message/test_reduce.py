"""Tests the sum of messages over devices, and whether it may be applied."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._core.message import (
    Message,
    Passengers,
    Reduced,
    layout_of,
    message_of,
    summands,
)

from .example import message

DEVICES = 4


def test_gradients_are_coded_and_the_rest_stays_exact():
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
    ("valid", "weight", "bad"),
    list(itertools.product([True, False], [None, 0, 3], [0.0, np.nan, np.inf])),
)
def test_sum_counts_with_examples_and_is_usable_if_finite(valid, weight, bad):
    """A sum counts if it has examples, and is usable if it also is finite."""
    found = Reduced.of(message(1.0, weight, bad), jnp.array(valid))
    counts = valid and weight != 0
    assert bool(found.counts) == counts
    assert bool(found.finite) == np.isfinite(bad)
    assert bool(found.usable) == (counts and np.isfinite(bad))


def test_finiteness_depends_on_gradients_and_changes():
    """A loss of NaN leaves a sum usable, and a change of NaN does not."""
    whole, valid = message(), jnp.array(True)
    nan = jnp.float32(np.nan)
    loss = whole._replace(passengers=Passengers.of(nan, {}))
    assert Reduced.of(loss, valid).finite
    changes = whole._replace(changes={"mean": jnp.array([1, nan]), "count": None})
    assert not Reduced.of(changes, valid).finite
    assert Reduced.of(Message({}), valid).finite


@pytest.mark.parametrize("shape", [(3,), (70000,), (300, 400), (3, 3, 96, 128)])
def test_norm_costs_no_further_read(shape):
    """Finiteness and squares are found in one pass over an array."""

    def checked(x):
        found = Reduced.of(Message({"w": x}), jnp.array(True))
        return found.finite, found.norm

    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    finite, norm = jax.jit(checked)(x)
    assert finite
    np.testing.assert_allclose(norm, np.linalg.norm(x.astype(np.float64)), rtol=1e-5)
    cost = jax.jit(checked).lower(x).compile().cost_analysis()
    assert cost["bytes accessed"] <= 1.02 * x.nbytes + 500


def test_huge_elements_are_finite_without_a_finite_norm():
    found = Reduced.of(Message({"w": jnp.full(3, 1e30)}), jnp.array(True))
    assert found.finite
    assert np.isinf(found.norm)
