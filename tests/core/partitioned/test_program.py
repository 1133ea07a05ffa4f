"""Tests updates of Optax on pieces of arrays against the same updates of whole ones."""

import jax
import jax.numpy as jnp
import optax
import pytest

from pipejax._core.partitioned import on_partitions

from .updates import DEVICES, assert_close, on_devices, planned

contrib = optax.contrib


ELEMENTWISE = {
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(1e-3),
    "lion": optax.lion(1e-3),
    "multi steps": optax.MultiSteps(optax.adamw(1e-3), 3),
    "schedule": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1, 0, 9)),
    "partition": optax.partition(
        {"a": optax.adamw(1e-3), "b": optax.sgd(0.1)},
        {"first": "a", "second": "b", "whole": "a"},
    ),
    "mask": optax.masked(
        optax.adamw(1e-3), {"first": True, "second": False, "whole": True}
    ),
    "noise": optax.noisy_sgd(0.1, key=jax.random.key(0)),
    "schedule free": contrib.schedule_free_adamw(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=128),
}
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))
WITH_SUMS = {
    "clip": (optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)), [3]),
    "if finite": (optax.apply_if_finite(optax.adam(1e-3), 3), [2]),
    "lamb": (optax.lamb(1e-3), [4, 4]),
    "factored": (optax.adafactor(1e-3, min_dim_size_to_factor=2), [4, 4]),
    "sm3": (optax.sm3(1e-3), [2]),
    "novograd": (optax.novograd(1e-3), [3]),
    "multi steps": (optax.MultiSteps(CLIPPED, 3), [3]),
    "finite and clipped": (optax.apply_if_finite(CLIPPED, 3), [3]),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_updates_equal_whole_arrays(name):
    """XLA simplifies the two programs differently, so roundings may differ."""
    update, args, splits, program = planned(ELEMENTWISE[name])
    found = on_devices(program, args, splits)
    assert_close(found, jax.jit(update)(*args), rounding=1e-6)


@pytest.mark.parametrize("name", WITH_SUMS)
def test_sums_over_whole_arrays_are_added_over_devices(name):
    tx, most = WITH_SUMS[name]
    update, args, splits, program = planned(tx)
    assert len(program.levels) == len(most) + 1
    assert all(len(program.sums(i)) <= count + 2 for i, count in enumerate(most))
    found = on_devices(program, args, splits)
    assert_close(found, jax.jit(update)(*args), rounding=1e-6)


def barrier(*values):
    return jax.lax.optimization_barrier(values)


EQUAL = {
    "computed": lambda x, c: x * (0.5 * jnp.zeros_like(x) + 2) ** 2,
    "after a sum": lambda x, c: x + (jnp.sum(x) * jnp.ones_like(x)) * 2,
    "compared": lambda x, c: jnp.where(jnp.zeros_like(x) + c > 1, x, 2 * x),
    "clamped": lambda x, c: x * jnp.clip(jnp.full_like(x, 3) * c, 0, 1),
    "returned": lambda x, c: (x, jnp.full_like(x, c) * 2 + 1),
    "in a branch": lambda x, c: jax.lax.cond(
        c > 0, lambda z: z + x, lambda z: z - x, jnp.zeros_like(x) + c
    ),
    "a number in a barrier": lambda x, c: (
        jnp.broadcast_to(barrier(jnp.zeros_like(x), c)[1], x.shape) + x
    ),
    "beside pieces in a barrier": lambda x, c: (
        x + jnp.sum(barrier(x, jnp.ones_like(x) * 2)[1])
    ),
    "of other bits": lambda x, c: (
        x,
        jax.lax.bitcast_convert_type(
            jnp.zeros((8, 4), jnp.uint8) + jnp.uint8(1), jnp.float32
        ),
    ),
}


@pytest.mark.parametrize("function", EQUAL.values(), ids=EQUAL)
def test_functions_of_equal_elements_equal_whole_arrays(function):
    args = jnp.arange(8, dtype=jnp.float32), jnp.float32(3)
    splits = [(("data",),), ()]
    program = on_partitions(function, args, splits, DEVICES)
    found = on_devices(program, args, splits)
    assert_close(found, jax.jit(function)(*args), rounding=1e-6)
