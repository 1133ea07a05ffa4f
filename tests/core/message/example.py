"""Provides a message with everything on board."""

import jax.numpy as jnp

from pipejax._core.message import Message, Passengers


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
