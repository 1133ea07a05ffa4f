"""Finds frozen parameters: those whose gradients no result of an optimizer needs.

- `optax.partition` with `optax.set_to_zero` for some labels freezes their parameters.
  So does any other transformation that gives an update without reading its gradient.
- The gradient of a frozen parameter is not computed, and so not sent. `None` takes its
  place in messages, and the optimizer is given zeros.
- A norm by which all gradients are clipped needs all of them. If `tx` clips before the
  partition, nothing is frozen, and a log record says so.
"""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pipejax._internal.sources import sources
from pipejax._internal.types import Tree
from pipejax._internal.zeros import zeros

from ._update import updated

_log = logging.getLogger(__name__)


def without_frozen(tx: optax.GradientTransformation, params: optax.Params) -> Tree:
    """Returns the parameters, with `None` in place of those that `tx` leaves frozen.

    Must be called where `tx.update` may use its mesh axes. If `tx` reads no gradient at
    all, the parameters are returned as they are.
    """
    leaves, structure = jax.tree.flatten(params)
    reads = _reads(tx, structure, _forms(leaves))
    kept = [leaf if read else None for leaf, read in zip(leaves, reads, strict=True)]
    return jax.tree.unflatten(structure, kept)


def moves(tx: optax.GradientTransformation, params: optax.Params) -> Tree:
    """Returns for each parameter whether its update may be other than zero.

    It may be so without a gradient, as with weight decay or a schedule.
    """
    leaves, structure = jax.tree.flatten(params)
    zero = _zero(tx, structure, _forms(leaves))
    return jax.tree.unflatten(structure, [not x for x in zero[: len(leaves)]])


def _forms(leaves: list[Any]) -> tuple[Any, ...]:
    return tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves)


def _update(
    tx: optax.GradientTransformation, structure: Any, forms: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Returns the update as a function, and the forms of its arguments."""
    params = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*x) for x in forms])
    opt_state = jax.eval_shape(tx.init, params)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    return functools.partial(updated, tx), params, opt_state, params, loss


# An update of many arrays takes seconds to trace, and several programs ask.
@functools.lru_cache(maxsize=64)
def _zero(
    tx: optax.GradientTransformation, structure: Any, forms: tuple[Any, ...]
) -> list[bool]:
    return zeros(*_update(tx, structure, forms))


@functools.lru_cache(maxsize=64)
def _reads(
    tx: optax.GradientTransformation, structure: Any, forms: tuple[Any, ...]
) -> tuple[bool, ...]:
    """Returns for each parameter whether any result of an update needs its gradient."""
    # The leaves of gradients, optimizer state, parameters and loss have numbers.
    found = sources(*_update(tx, structure, forms))
    numbers = range(len(forms))
    read = frozenset(numbers) & frozenset[int]().union(*found)
    if not read:
        return (True,) * len(forms)
    # The first results are the updates of the parameters, in their order.
    still = [i for i in numbers if i in read and not found[i] & frozenset(numbers)]
    if still:
        named = jax.tree.unflatten(structure, numbers)
        path, _ = jax.tree_util.tree_leaves_with_path(named)[still[0]]
        _log.warning(
            "the gradients of %d parameters, the first of params%s, are computed, and"
            " sent in a pipeline, although their own updates do not need them: another"
            " part of `tx` does. Put that part inside the partition, as in"
            " optax.partition({'train':"
            " optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4)),"
            " 'freeze': optax.set_to_zero()}, labels)",
            len(still),
            jax.tree_util.keystr(path),
        )
    return tuple(i in read for i in numbers)
