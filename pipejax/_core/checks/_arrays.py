"""Checks that leaves are arrays with which JAX can compute.

Each error message names the leaf, the rule, the value and the remedy.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax._internal.keys import is_key
from pipejax._internal.types import Keys, Leaf, Tree


def fault_of(leaf: Leaf) -> str | None:
    """Says why JAX cannot compute with a leaf, or returns `None` if it can."""
    if isinstance(leaf, np.ma.MaskedArray):
        return "a masked array, whose mask JAX does not have"
    if isinstance(leaf, np.ndarray | np.generic) and not _is_numeric(leaf.dtype):
        return f"an array of dtype {leaf.dtype}"
    numbers = jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic | int | float
    if isinstance(leaf, numbers | complex) or hasattr(leaf, "__jax_array__"):
        return None
    return f"a {type(leaf).__name__}"


def check_arrays(name: str, tree: Tree) -> None:
    """Raises a `ValueError` for the first leaf that is no array of numbers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if fault := fault_of(leaf):
            raise no_array(name, path, fault)


def no_array(name: str, path: Any, fault: str) -> ValueError:
    """Returns the error for a leaf that is no array of numbers."""
    return ValueError(
        f"`{name}` must hold arrays of numbers, got"
        f" `{name}{jax.tree_util.keystr(path)}`, {fault}. Leave it out, or convert it:"
        " categories to integers, a masked array to `x.filled(0)` and a mask of its"
        " own, another byte order to `x.astype(x.dtype.newbyteorder('='))`."
        " `train.batch` converts the arrays of other libraries."
    )


def check_keys(rng: Keys) -> None:
    """Raises a `ValueError` unless `rng` is `None` or a pytree of single PRNG keys."""
    leaves = jax.tree_util.tree_leaves_with_path(rng)
    if rng is not None and not leaves:
        raise ValueError(f"`rng` must hold at least one PRNG key, got {rng!r}. {_MAKE}")
    raw = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    for path, leaf in leaves:
        form = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if (is_key(leaf) and form[0] == ()) or form == (raw.shape, raw.dtype):
            continue
        found = f"{form[1]}{[*form[0]]}" if form[0] is not None else None
        raise ValueError(
            "`rng` must be a PRNG key or a pytree of keys, got"
            f" `rng{jax.tree_util.keystr(path)}`, {found or f'a {type(leaf).__name__}'}"
            f" in its place. {_MAKE}"
        )


_MAKE = (
    "Pass `jax.random.key(0)`, or `{'dropout': jax.random.key(0)}` for several kinds"
    " of random numbers; an nnx.Rngs is made in the loss function: `nnx.Rngs(rng)`."
)


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    # JAX has no times, no numbers of more than 64 bits, and no other byte order.
    if dtype.kind in "mM" or dtype.char in "gG" or not dtype.isnative:
        return False
    return dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)
