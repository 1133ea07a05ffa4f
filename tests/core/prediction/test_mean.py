"""Tests the mean gradient that was applied last."""

import jax
import jax.numpy as jnp
import numpy as np

from pipejax._core.prediction import Mean


def test_mean_has_the_smaller_dtype():
    params = {"w": jnp.ones(2), "half": jnp.ones(2, jnp.bfloat16)}
    dtypes = jax.tree.map(lambda x: x.dtype, Mean.empty(params, jnp.bfloat16).gradients)
    assert dtypes == {"w": jnp.bfloat16, "half": jnp.bfloat16}
    dtypes = jax.tree.map(lambda x: x.dtype, Mean.empty(params, None).gradients)
    assert dtypes == {"w": jnp.float32, "half": jnp.bfloat16}
    kept = Mean.empty(params, None).after(params, jnp.float32(2))
    assert (kept.loss, kept.known) == (2, True)


def test_mean_is_zero_where_gradients_are_not_finite():
    """With `skip_nonfinite=False`, an optimizer may be given NaN."""
    mean = Mean({"w": jnp.float32([0.1, -0.2, 0.05])}, jnp.float32(2), jnp.array(True))
    bad = {"w": jnp.float32([np.nan, 5.0, np.inf])}
    kept = mean.after(bad, jnp.float32(np.nan))
    np.testing.assert_array_equal(kept.gradients["w"], np.float32([0.0, 5.0, 0.0]))
    assert kept.loss == 2


def test_mean_beyond_its_dtype_is_zero():
    """70,000 is finite in float32, in which the mean arrives."""
    kept = Mean.empty({"w": jnp.zeros(2)}, jnp.float16)
    kept = kept.after({"w": jnp.float32([1.0, 70_000.0])}, jnp.float32(0))
    np.testing.assert_array_equal(kept.gradients["w"], [1.0, 0.0])
