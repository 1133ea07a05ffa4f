"""Helps to test corrections for a plain delay."""

import functools

import jax.numpy as jnp

from pipejax import stability

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
