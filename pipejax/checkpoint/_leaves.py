"""The leaves of a state by name, in the form in which Orbax writes them bit for bit.

- A name is JAX's path to a leaf, such as `params['a.b']`, which is another one than
  `params['a']['b']`.
- A typed PRNG key is written as the integers it holds, and an integer of fewer than
  eight bits as int8. Shape and dtype are kept beside them, so that nothing is mistaken
  for something else that is written alike.
- A leaf of size 0 is not written: shape and dtype are all there is to know.
- A weak type, that of `jnp.asarray(1.0)`, is kept beside the leaf: its product with a
  bfloat16 array is bfloat16, where that of float32 would be float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Form = tuple[tuple[int, ...], str]
"""Shape, and the name of the dtype."""


def named(tree: Any) -> dict[str, Any]:
    """Returns the leaves of `tree` by name.

    Raises:
      ValueError: if two leaves have one name, as in a node of the user's own that gives
        two children the same key.

    >>> named({"a.b": 1, "a": {"b": 2}, "c": [3]})
    {"['a']['b']": 2, "['a.b']": 1, "['c'][0]": 3}
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path).removeprefix(".")
        if name in leaves:
            raise ValueError(
                f"`state` must have leaves of different names, got two of {name}."
                " Register the node that holds them with a key of its own for each."
            )
        leaves[name] = leaf
    return leaves


def form(leaf: Any) -> Form:
    """Returns shape and dtype of `leaf`; that of a PRNG key names its implementation.

    >>> form(jax.random.key(0))
    ((), 'key<fry>')
    """
    return tuple(leaf.shape), leaf.dtype.name


def encoded(leaf: Any) -> Any:
    """Returns `leaf` in a dtype that can be written."""
    if _is_key(leaf):
        return jax.random.key_data(leaf)
    return leaf.astype(jnp.int8) if _is_narrow(leaf) else leaf


def decoded(array: jax.Array, like: Any) -> jax.Array:
    """Returns the leaf that was encoded as `array`; `like` is its shape and dtype."""
    if _is_key(like):
        return jax.random.wrap_key_data(array, impl=_implementation(like))
    return array.astype(like.dtype) if _is_narrow(like) else array


def is_weak(leaf: Any) -> bool:
    """Returns whether the leaf takes the dtype of what it is combined with."""
    return getattr(leaf, "weak_type", False)


def weakened(leaf: jax.Array) -> jax.Array:
    """Returns the same bits as a weak type.

    An array that is written into keeps its own type, here that of a Python scalar,
    which is of 64 bits under `jax_enable_x64`.
    """

    def written(leaf: jax.Array) -> jax.Array:
        return jnp.full(leaf.shape, leaf.dtype.type(0).item()).at[...].set(leaf)

    with jax.enable_x64(leaf.dtype.name in ("int64", "float64", "complex128")):
        return jax.jit(written, out_shardings=leaf.sharding)(leaf)


def empty(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the only array of a shape of size 0, without a transfer or collective."""
    nothing = np.zeros(shape.shape, shape.dtype)
    return jax.make_array_from_callback(
        shape.shape, shape.sharding, lambda index: nothing[index]
    )


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_narrow(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.integer) and jnp.iinfo(leaf.dtype).bits < 8


def _implementation(like: Any) -> Any:
    """Returns the PRNG implementation of a key, or of the shape of one."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), like)
    return found[0]
