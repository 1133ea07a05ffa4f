"""Tells PRNG keys from other arrays, and passes them through functions of numbers."""

from collections.abc import Callable
from typing import Any

import jax


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf is an array of typed PRNG keys, or its shape."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def key_of(seed: jax.Array) -> jax.Array:
    """Returns a key from which all devices and programs draw the same numbers.

    With `jax_default_prng_impl="rbg"`, numbers would depend on the compiler, and under
    `jax.vmap`, the first seed would decide those of all seeds.
    """
    return jax.random.key(seed, impl="threefry2x32")


def as_numbers(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns `function(tree)`, where the function gets numbers in place of keys."""
    leaves, structure = jax.tree.flatten(tree)
    # JAX takes a key as used once it has passed through an operation that is not about
    # keys, such as a barrier, and `jax_debug_key_reuse` then raises an error at the
    # next use.
    found = [jax.random.key_data(x) if is_key(x) else x for x in leaves]
    found = jax.tree.leaves(function(jax.tree.unflatten(structure, found)))
    after = [
        jax.random.wrap_key_data(x, impl=jax.random.key_impl(key)) if is_key(key) else x
        for x, key in zip(found, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, after)
