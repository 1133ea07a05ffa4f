"""Names the leaves of a state, and encodes them so that Orbax writes every bit.

- The name of a leaf is its path in the pytree as JAX writes it, without `trainable`.
- A typed PRNG key is written as the integers that it holds, and an integer of fewer
  than eight bits as int8. The shape and dtype of each leaf are written too, because two
  leaves of different dtypes may have the same encoded form.
- A leaf of size 0 is not written, because its shape and dtype say everything.
- Whether the type of a leaf is weak, as it is for `jnp.asarray(1.0)`, is written too:
  the product of a weakly typed float32 and a bfloat16 array has dtype bfloat16.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax._internal.keys import is_key

Form = tuple[tuple[int, ...], str]
"""The shape of a leaf and the name of its dtype."""

# Parts of a state that are sometimes not read, but made anew.
QUEUE, CODECS = "in_flight.pending", "in_flight.codec_states"
MEAN, SLOPES, GATHERED = "mean", "slopes", "gathered"
COUNTERS = "delayed_counters"


def named(tree: Any) -> dict[str, Any]:
    """Returns the leaves of `tree` by name; raises a ValueError if two names are equal.

    Examples:
      >>> named({"a.b": 1, "a": {"b": 2}, "c": [3]})
      {"['a']['b']": 2, "['a.b']": 1, "['c'][0]": 3}
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path).removeprefix(".")
        name = name.removeprefix("trainable.")
        if name in leaves:
            raise ValueError(
                f"`state` must have leaves of different names, got two named {name}."
                " Register the pytree node that holds them with a different key for"
                " each child."
            )
        leaves[name] = leaf
    return leaves


def form(leaf: Any) -> Form:
    """Returns shape and dtype of `leaf`; a key's dtype names its implementation."""
    return tuple(leaf.shape), leaf.dtype.name


def part_of(name: str, parts: tuple[str, ...]) -> bool:
    """Returns whether a leaf belongs to one of these parts of a state."""
    return any(name == x or name.startswith((f"{x}.", f"{x}[")) for x in parts)


def encoded(leaf: Any) -> Any:
    if is_key(leaf):
        return jax.random.key_data(leaf)
    return leaf.astype(jnp.int8) if _is_narrow(leaf) else leaf


def decoded(array: jax.Array, like: Any) -> jax.Array:
    """Undoes `encoded` for a leaf of the dtype of `like`."""
    if is_key(like):
        return jax.random.wrap_key_data(array, impl=_implementation(like))
    return array.astype(like.dtype) if _is_narrow(like) else array


def is_weak(leaf: Any) -> bool:
    return getattr(leaf, "weak_type", False)


def weakened(leaf: jax.Array) -> jax.Array:
    """Returns an array of the same bits whose type is weak."""

    def written(leaf: jax.Array) -> jax.Array:
        # An update keeps the type of the array that it is applied to. This array is
        # filled with a Python scalar, and therefore has a weak type.
        return jnp.full(leaf.shape, leaf.dtype.type(0).item()).at[...].set(leaf)

    # A Python scalar becomes an array of 64 bits only under `jax_enable_x64`.
    with jax.enable_x64(leaf.dtype.name in ("int64", "float64", "complex128")):
        return jax.jit(written, out_shardings=leaf.sharding)(leaf)


def empty(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the array of a shape of size 0, without a transfer or a collective."""
    nothing = np.zeros(shape.shape, shape.dtype)
    return jax.make_array_from_callback(
        shape.shape, shape.sharding, lambda index: nothing[index]
    )


def zeros(form: Any, shardings: Any) -> Any:
    """Returns arrays of zeros with the shapes of `form`."""

    def made() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), form)

    return jax.jit(made, out_shardings=shardings)()


def _is_narrow(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.integer) and jnp.iinfo(leaf.dtype).bits < 8


def _implementation(like: Any) -> Any:
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), like)
    return found[0]
