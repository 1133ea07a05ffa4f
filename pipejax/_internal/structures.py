"""Compares pytrees by their containers and the paths of their leaves.

JAX compares structures with the static data in their nodes, such as the functions in a
model. These may differ between two processes, or between a run and its continuation: a
function is equal only to itself. The functions here leave static data out.
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def containers(tree: Any) -> str:
    """Returns the types of the nodes of a pytree as text, such as `list[*]`."""

    def text(structure: Any) -> str:
        node = structure.node_data()
        if node is None:
            return "*"
        return f"{node[0].__qualname__}[{', '.join(map(text, structure.children()))}]"

    return text(jax.tree.structure(tree))


def paths(tree: Any) -> set[Any]:
    return {path for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


def alike(a: Any, b: Any) -> bool:
    """Returns whether two pytrees have equal containers, and leaves at equal paths."""
    return paths(a) == paths(b) and containers(a) == containers(b)


def identical(a: Any, b: Any) -> bool:
    """Returns whether two pytrees hold the same arrays, not only equal ones."""
    leaves, others = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(leaves) == len(others) and all(map(operator.is_, leaves, others))


def select(predicate: jax.Array, new: Any, old: Any) -> Any:
    """Returns the leaves of `new` if `predicate` is true, and those of `old` if not."""
    return jax.tree.map(lambda n, o: jnp.where(predicate, n, o), new, old)


def restructured(tree: Any, like: Any) -> Any:
    """Returns the leaves of `tree` in nodes with the static data of `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(tree))


def no_leaf(tree: Any) -> Any:
    """Returns a pytree with `None` in place of every leaf."""
    return jax.tree.map(lambda _: None, tree)


HYPERPARAMETERS = jax.tree_util.GetAttrKey("hyperparams")
"""The part of a path to the hyperparameters of `optax.inject_hyperparams`."""


def of_leaves(items: Sequence[Any], tree: Any, part: Any) -> tuple[Any, ...]:
    """Returns those of the items, one for each leaf of `tree`, whose leaf `part` has.

    Without items, nothing is returned.

    Examples:
      >>> of_leaves((3, 4), {"a": 1, "b": 2}, {"a": None, "b": 1})
      (4,)
    """
    there, leaves = paths(part), jax.tree_util.tree_leaves_with_path(tree)
    pairs = zip(leaves, items, strict=bool(items))
    return tuple(item for (path, _), item in pairs if path in there)


def like_optimizer(
    opt_state: Any, params: Any, items: Sequence[Any], default: Any
) -> Any:
    """Returns a pytree like an optimizer's state, with an item for every leaf.

    There is an item for each parameter. It goes to those leaves of the state that are
    like its parameter, and `default` to all others.

    Examples:
      >>> like_optimizer((0, {"w": 5.0}), {"w": 3.0}, ["w"], "shared")
      ('shared', {'w': 'w'})
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    known = {
        (path, jnp.shape(leaf)): item
        for (path, leaf), item in zip(leaves, items, strict=True)
    }
    own, below = paths(params), dict[Any, set[Any]]()
    for path in paths(opt_state):
        for start in range(len(path) + 1):
            below.setdefault(path[:start], set()).add(path[start:])

    def item(path: Any, leaf: Any) -> Any:
        # An Optax state holds moments, averages and accumulated gradients in pytrees
        # like the parameters. The path of such a leaf ends with the path of its
        # parameter. All others, such as counters, belong to no parameter.
        shape = jnp.shape(leaf)
        for start in range(len(path) + 1):
            found = known.get((path[start:], shape))
            # A counter may have the name of a scalar parameter. It has other fields
            # beside it.
            if found is not None and (shape or below[path[:start]] <= own):
                return found
        return default

    return jax.tree_util.tree_map_with_path(item, opt_state)


def merged(part: Any, whole: Any) -> Any:
    """Returns `part`, with the leaves of `whole` where `part` has `None`.

    Examples:
      >>> merged({"a": None, "b": 2}, {"a": 1, "b": 1})
      {'a': 1, 'b': 2}
    """
    return jax.tree.map(lambda w, p: w if p is None else p, whole, part)


def with_zeros(part: Any, whole: Any) -> Any:
    """Returns `part`, with zeros like the leaf of `whole` where `part` has `None`."""
    return jax.tree.map(lambda w, p: jnp.zeros_like(w) if p is None else p, whole, part)


def form_of(tree: Any) -> Any:
    """Returns structure, shapes and dtypes of a pytree, to be compared or hashed."""
    leaves, structure = jax.tree.flatten(tree)
    # This runs in every step. `jnp.shape` and `jnp.result_type` take ten times as long.
    forms = ((getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves)
    return structure, tuple(forms)


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every leaf, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}


def difference(name: str, wanted: Any, given: Any) -> tuple[str, str, str] | None:
    """Returns path, wanted and given form of the first leaf that differs, if any."""
    forms, found = (named_forms(tree, name) for tree in (wanted, given))
    for path in forms | found:
        if forms.get(path) != found.get(path):
            return path, forms.get(path, "is none of it"), found.get(path, "nothing")
    return None


def named_forms(tree: Any, name: str = "") -> dict[str, str]:
    """Returns dtype and shape of every leaf, such as `float32[7, 3]`, by its path."""
    return {
        f"{name}{jax.tree_util.keystr(path)}": f"{_dtype(leaf)}{[*jnp.shape(leaf)]}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _dtype(leaf: Any) -> Any:
    kind = getattr(leaf, "dtype", type(leaf))
    if isinstance(kind, type) and not issubclass(kind, bool | int | float | complex):
        return kind.__name__
    return jax.dtypes.canonicalize_dtype(kind, allow_extended_dtype=True)
