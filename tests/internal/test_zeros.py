"""Tests which results are known to be zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pipejax._internal.zeros import zeros

X, KEY = jnp.arange(3.0), jax.random.key(0)


def test_sums_over_devices_are_told_apart():
    """One equation has the sums of several arrays."""

    def both(x):
        return jax.lax.psum((0 * x, x), "data")

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": P(), "out_specs": P(), "check_vma": False}
    found = []

    def local(x):
        found.append(zeros(both, x))
        return x

    jax.eval_shape(jax.shard_map(local, **specs), X)
    assert found == [[True, False]]


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
        lambda x: jax.vmap(lambda y: jax.lax.psum((0 * y, y), "i")[1], axis_name="i")(
            x
        ),
        lambda x: x * jax.random.uniform(KEY, (3,)),
        lambda x: jax.lax.fori_loop(0, 2, lambda _, y: y + 1, 0 * x),
    ],
)
def test_other_results_are_not_taken_for_zero(function):
    assert zeros(function, X) == [False]
