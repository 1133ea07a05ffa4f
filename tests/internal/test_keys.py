"""Tests that keys pass through functions of numbers, and stay keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pipejax._internal.keys import as_numbers, is_key, key_of

from ..switches import switched


def test_typed_keys_are_told_from_other_arrays():
    key = jax.random.key(0)
    assert is_key(key)
    assert is_key(jax.random.split(key, 3))
    assert is_key(jax.eval_shape(lambda: key))
    assert jax.jit(lambda key: jnp.bool_(is_key(key)))(key)
    others = (jax.random.PRNGKey(0), np.ones(2, np.uint32), 3, None, "key")
    assert not any(map(is_key, others))


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_keys_keep_their_implementation(kind):
    tree = {"keys": jax.random.split(jax.random.key(1, impl=kind), 3), "x": jnp.ones(2)}
    found = as_numbers(lambda tree: jax.tree.map(lambda x: x + 1, tree), tree)
    assert found["keys"].dtype == tree["keys"].dtype
    moved, before = map(jax.random.key_data, (found["keys"], tree["keys"]))
    np.testing.assert_array_equal(moved, before + 1)


def test_barrier_does_not_use_up_a_key():
    @jax.jit
    def drawn(key):
        return jax.random.normal(as_numbers(lax.optimization_barrier, key))

    with switched("jax_debug_key_reuse", True):
        assert np.isfinite(drawn(jax.random.key(0)))


def test_key_of_a_seed_depends_on_the_seed_alone():
    """Under `jax.vmap`, other generators draw all numbers from the first key."""
    seeds = jnp.arange(3, dtype=jnp.uint32)

    def drawn(seed):
        return jax.random.bits(key_of(seed), (4,))

    wanted = [drawn(seed).tolist() for seed in seeds]
    with jax.default_prng_impl("rbg"):
        assert jax.vmap(drawn)(seeds).tolist() == wanted
