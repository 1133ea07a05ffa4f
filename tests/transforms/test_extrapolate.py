"""Tests extrapolated updates: by hand, their inverse, and their stability."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pipejax import transforms

from .helpers import TREE, max_learning_rate, outputs


def test_extrapolation_adds_the_error_of_its_guess():
    tx = transforms.extrapolate_updates(2)
    # Each update is d + 2 (d - d_before), where d_before is 0 at first.
    assert outputs(tx, [1, 1, 4, 0]) == [3, 1, 10, -8]


def test_extrapolation_by_0_steps_changes_nothing():
    assert outputs(transforms.extrapolate_updates(0), [1, -5]) == [1, -5]


def test_unextrapolated_parameters_equal_the_plain_recursion():
    """The parameters in the loop are `steps` updates ahead of the plain ones."""
    tx = optax.chain(optax.sgd(0.1), transforms.extrapolate_updates(1.5))
    x = y = TREE
    state = tx.init(y)
    rng = np.random.default_rng(0)
    for _ in range(5):
        g = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), TREE)
        updates, state = tx.update(g, state, y)
        y = optax.apply_updates(y, updates)
        x = jax.tree.map(lambda x, g: x - 0.1 * g, x, g)
        plain = transforms.unextrapolated(state, y)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), plain, x)
        last = jax.tree.map(lambda x, g: x - 1.5 * 0.1 * g, x, g)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), y, last)


def predicted(steps):
    return lambda rate: optax.chain(
        optax.sgd(rate, momentum=0.9), transforms.extrapolate_updates(steps)
    )


def test_prediction_gives_back_part_of_the_stability():
    """Prediction raises the limit at width 2 from 0.1 to 0.27; at width 1 it is 3.8."""
    assert max_learning_rate(predicted(0), 2) == pytest.approx(0.1, rel=1e-5)
    assert max_learning_rate(predicted(1), 2) == pytest.approx(0.270, rel=5e-3)


def test_prediction_costs_plain_sgd_stability():
    def family(rate):
        return optax.chain(optax.sgd(rate), transforms.extrapolate_updates(1))

    assert max_learning_rate(family, 2) == pytest.approx(0.618, rel=1e-3)


@pytest.mark.parametrize("steps", [-1, np.inf, "1"])
def test_steps_must_be_a_finite_number_of_at_least_0(steps):
    with pytest.raises(ValueError, match="`steps` must be a finite"):
        transforms.extrapolate_updates(steps)


def test_unextrapolated_needs_a_state_with_extrapolation():
    with pytest.raises(
        ValueError, match="must hold one ExtrapolateUpdatesState, got 0"
    ):
        transforms.unextrapolated(optax.sgd(0.1).init(TREE), TREE)


@pytest.mark.parametrize("updates", ["float32", "bfloat16"])
def test_dtypes_of_updates_and_state_stay(updates):
    tx, params = transforms.extrapolate_updates(1), jnp.ones(3, "bfloat16")
    g = jnp.ones(3, updates)
    state = tx.init(params)
    found, after = tx.update(g, state, params)
    assert found.dtype == g.dtype
    assert [x.dtype for x in jax.tree.leaves(after)] == [
        x.dtype for x in jax.tree.leaves(state)
    ]
