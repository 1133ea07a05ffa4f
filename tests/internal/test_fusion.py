"""Tests that XLA on CPUs fuses nothing across the border of a function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pipejax._internal.fusion import concatenated, unfused

X = jnp.arange(24.0).reshape(4, 6)


def cut(x):
    return {"head": x.reshape(-1)[:5], "tail": x.reshape(-1)[5:]}


def decoded(x):
    return x * 2 + 1


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap])
def test_results_equal_the_function(wrap):
    found, wanted = wrap(lambda x: unfused(cut, decoded(x)))(X), wrap(cut)(decoded(X))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_function_on_cpus_is_in_a_conditional_and_on_gpus_is_not():
    traced = jax.jit(lambda x: unfused(cut, decoded(x))).trace(X)
    on_cpu = traced.lower(lowering_platforms=("cpu",)).compile().as_text()
    on_gpu = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert " conditional(" in on_cpu
    assert "optimization_barrier" not in on_gpu


def test_arguments_may_be_missing_or_of_any_dtype():
    for dtype in (jnp.uint8, jnp.bfloat16, jnp.float32, jnp.bool):
        x = jnp.array([0, 1, 1], dtype)
        found = jax.jit(lambda x: unfused(lambda x, none: x[::-1], x, None))(x)
        np.testing.assert_array_equal(found, x[::-1])


@pytest.mark.parametrize("checks", [True, False])
def test_results_vary_over_devices_as_arguments_do(checks):
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))

    def local(x, y):
        return unfused(cut, decoded(x)), unfused(cut, decoded(y))

    specs = P("data"), P()
    wrapped = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=checks
    )
    found = jax.jit(wrapped)(X, X)
    jax.tree.map(np.testing.assert_array_equal, found[1], cut(decoded(X)))
    wanted = [cut(decoded(rows))["head"] for rows in jnp.split(X, 2)]
    np.testing.assert_array_equal(found[0]["head"], jnp.concatenate(wanted))


def test_concatenation_equals_jax_numpy():
    pieces = [jnp.arange(n, dtype=jnp.float32) for n in (3, 0, 5)]
    np.testing.assert_array_equal(
        jax.jit(concatenated)(pieces), jnp.concatenate(pieces)
    )
