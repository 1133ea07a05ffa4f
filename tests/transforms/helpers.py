"""Helps to test corrections for a plain delay."""

import functools

import jax
import jax.numpy as jnp
import optax

from pipejax import stability

from ..helpers import assert_bits_equal

TREE = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(3.0)}


def outputs(tx, gradients, params=None):
    """Returns the updates of `tx` for a sequence of gradients, applied one by one."""
    params = jnp.float32(0) if params is None else params
    state, found = tx.init(params), []
    for gradient in gradients:
        update, state = tx.update(jnp.float32(gradient), state, params)
        params = params + update
        found.append(float(update))
    return found


# Corrections are for a plain delay, so stability is that without weight prediction.
max_learning_rate = functools.partial(
    stability.max_learning_rate, weight_prediction=False
)


def assert_keeps_form(tx):
    """Asserts that an update keeps the structure and the dtypes of the state."""
    state = tx.init(TREE)
    _, after = tx.update(TREE, state, TREE)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    dtypes, wanted = ([x.dtype for x in jax.tree.leaves(y)] for y in (after, state))
    assert dtypes == wanted


def assert_changes_nothing(tx):
    """Asserts that a transformation returns the gradients that it is given."""
    params, state = TREE, tx.init(TREE)
    for scale in (1.0, -0.3):
        gradient = jax.tree.map(lambda x, s=scale: s * x, TREE)
        updates, state = tx.update(gradient, state, params)
        assert_bits_equal(updates, gradient)
        params = optax.apply_updates(params, updates)
