"""Tests the work that is handed to the communication thread."""

import jax
import jax.numpy as jnp

from pipejax._core.executors._submitted import identical, submitted


def test_arrays_with_equal_values_are_not_identical():
    x = jnp.zeros(3)
    assert identical({"a": x}, {"a": x})
    assert not identical({"a": x}, {"a": jnp.zeros(3)})
    assert not identical({"a": x}, {"a": x, "b": x})


def test_function_runs_where_jax_has_the_precision_of_the_caller():
    def dtype():
        return str(jnp.zeros(1, "float64" if jax.config.jax_enable_x64 else None).dtype)

    with jax.enable_x64(True):
        assert submitted(dtype).result() == "float64"
    with jax.enable_x64(False):
        assert submitted(dtype).result() == "float32"
