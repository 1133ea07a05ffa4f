"""Tests which results are known to be zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._internal.zeros import zeros

X = jnp.arange(3.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.zeros_like(x),
        lambda x: 0 * x + jnp.zeros(3),
        lambda x: -jnp.abs(0 * x).reshape(3, 1) @ x[None],
        lambda x: jnp.where(x > 1, 0.0, jnp.zeros(3)),
        lambda x: jax.jit(lambda y: 0 * y)(x).astype(jnp.bfloat16).sum(),
        lambda x: jax.lax.cond(x[0] > 0, lambda y: 0 * y, jnp.zeros_like, x),
        lambda x: jax.lax.optimization_barrier((x, 0 * x))[1],
        lambda x: jnp.asarray(np.zeros(3)) * x,
    ],
)
def test_zero_is_found(function):
    assert zeros(function, X) == [True]
    assert not np.any(np.asarray(function(X)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        lambda x: x - x,
        lambda x: 0 * x + 1,
        lambda x: jnp.cos(0 * x),
        lambda x: jnp.where(x > 1, 0.0, x),
        lambda x: jax.lax.cond(x[0] > 0, lambda y: 0 * y, lambda y: y, x),
        lambda x: jnp.concatenate([0 * x, x]),
        lambda x: jax.lax.fori_loop(0, 2, lambda _, y: y + 1, 0 * x),
    ],
)
def test_other_results_are_not_taken_for_zero(function):
    assert zeros(function, X) == [False]
