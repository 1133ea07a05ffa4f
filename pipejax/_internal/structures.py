"""Compares pytrees by their containers and the paths of their leaves.

JAX compares the structures of two pytrees with the static data in their nodes, such as
the functions in a model. Two equal models of two processes, or of a run and its
continuation, may have different static objects: a function is equal only to itself, and
its text holds an address. The functions here leave static data out.
"""

from typing import Any

import jax


def containers(tree: Any) -> str:
    """Returns the types of the nodes of a pytree as text, without their static data.

    Examples:
      >>> containers(({"a": 1, "b": None}, [2]))
      'tuple[dict[*, NoneType[]], list[*]]'
    """

    def text(structure: Any) -> str:
        node = structure.node_data()
        if node is None:
            return "*"
        return f"{node[0].__qualname__}[{', '.join(map(text, structure.children()))}]"

    return text(jax.tree.structure(tree))


def paths(tree: Any) -> set[Any]:
    """Returns the path of every leaf.

    Examples:
      >>> sorted(map(jax.tree_util.keystr, paths({"a": 1, "b": None, "c": [2]})))
      ["['a']", "['c'][0]"]
    """
    return {path for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


def alike(a: Any, b: Any) -> bool:
    """Returns whether two pytrees have the same containers, and leaves at equal paths.

    Examples:
      >>> alike({"a": 1}, {"a": 2}), alike({"a": 1}, {"b": 1}), alike([1], (1,))
      (True, False, False)
    """
    return paths(a) == paths(b) and containers(a) == containers(b)


def restructured(tree: Any, like: Any) -> Any:
    """Returns a pytree with the leaves of `tree` and the static data of `like`.

    Args:
      tree: A pytree.
      like: A pytree that is `alike`.
    """
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(tree))


def form_of(tree: Any) -> Any:
    """Returns structure, shapes and dtypes of a pytree as a value to compare and hash.

    The structure includes static data.
    """
    leaves, structure = jax.tree.flatten(tree)
    # This runs in every step. `jnp.shape` and `jnp.result_type` take ten times as long.
    forms = ((getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves)
    return structure, tuple(forms)
