"""Tests that every correction keeps its state's form, and is exact without a delay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import transforms

from ..helpers import batches, init_params, loss_fn
from .helpers import TREE, assert_changes_nothing, assert_keeps_form

BY_WIDTH = {
    "extrapolate": lambda width: transforms.extrapolate_updates(width - 1),
    "robust": functools.partial(transforms.delay_robust, 0.9),
}


@pytest.mark.parametrize("name", BY_WIDTH)
def test_correction_state_keeps_its_form_in_a_train_step(name):
    tx = BY_WIDTH[name](2)
    assert_keeps_form(tx)
    chained = optax.chain(tx, optax.sgd(0.05))
    train = pj.make_train_step(loss_fn, chained, mesh=pj.data_mesh(2))
    state = train.init(init_params())
    for batch in batches(5):
        state, info = train.step(state, batch)
    assert np.isfinite(info.loss)


@pytest.mark.parametrize("name", BY_WIDTH)
def test_loop_may_donate_parameters_and_state(name):
    """No array is shared between parameters and state, so both can be donated."""
    tx = BY_WIDTH[name](3)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = tx.update(TREE, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, TREE)
    expected, kept = jax.tree.map(jnp.copy, TREE), tx.init(TREE)
    state = tx.init(params)
    for _ in range(3):
        params, state = step(params, state)
        updates, kept = tx.update(TREE, kept, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), params, expected
    )


@pytest.mark.parametrize("name", BY_WIDTH)
def test_corrections_change_nothing_without_a_delay(name):
    assert_changes_nothing(BY_WIDTH[name](1))
