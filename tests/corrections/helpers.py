"""Helpers for the tests of corrections."""

import functools

import jax.numpy as jnp

from pipejax import stability

TREE = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(3.0)}


def outputs(tx, gradients, params=None):
    """What `tx` makes of each gradient, applied to the parameters as it goes."""
    params = jnp.float32(0) if params is None else params
    state, found = tx.init(params), []
    for gradient in gradients:
        update, state = tx.update(jnp.float32(gradient), state, params)
        params = params + update
        found.append(float(update))
    return found


# Of a plain delay, which is what is corrected.
max_learning_rate = functools.partial(
    stability.max_learning_rate, weight_prediction=False
)
