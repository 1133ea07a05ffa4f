"""Tests the memory that a compiled program needs against known sizes."""

import jax
import jax.numpy as jnp
import pytest

from pipejax.overlap import inspect

X = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)


@pytest.mark.parametrize("donated", [False, True])
def test_memory_has_arguments_outputs_and_aliased_bytes(donated):
    step = jax.jit(lambda x: 2 * x, donate_argnums=(0,) if donated else ())
    memory = inspect(step, X).memory
    assert (memory.arguments, memory.outputs) == (4_000_000, 4_000_000)
    assert memory.aliased == (4_000_000 if donated else 0)
    assert memory.live == memory.temporaries + (4_000_000 if donated else 8_000_000)


def test_temporaries_hold_intermediate_results():
    def step(x):
        return jnp.tanh(x @ x) @ x

    assert inspect(jax.jit(step), X).memory.temporaries >= 4_000_000


def test_memory_is_in_the_table_and_in_the_record():
    report = inspect(jax.jit(lambda x: 2 * x), X)
    assert "memory: arguments 4 MB, outputs 4 MB, temporaries 0 B" in str(report)
    assert report.to_dict()["memory"]["live"] == 8_000_000


def test_memory_is_unknown_for_text():
    text = jax.jit(lambda x: 2 * x).lower(X).compile().as_text()
    assert inspect(text).memory is None
