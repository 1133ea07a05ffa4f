"""Finds the points of an optimizer: copies of parameters on which its updates depend.

The sequence z of `optax.contrib.schedule_free` is a point, and so are the initial
parameters in `optax.contrib.madgrad`. When an exchange moves the parameters of a group,
its points must move along, or the next update takes the group back.

A leaf of an optimizer's state is a point if `init` copies it from the parameters, and
if updates depend on it. An average of the weights is no point: no update depends on it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pipejax._core.step import updated
from pipejax._internal.jaxpr import inlined, name_of
from pipejax._internal.sources import sources
from pipejax._internal.structures import like_optimizer
from pipejax._internal.types import Tree

from ._form import Form

_COPIES = ("copy", "copy_p", "convert_element_type")


def points_of(
    tx: optax.GradientTransformation, form: Form, opt_state: optax.OptState
) -> Tree:
    """Returns the points of a state, with `None` in place of all other leaves.

    `form` is that of the parameters.
    """
    flags = iter(_flags(tx, form.structure, form.leaves))
    return jax.tree.map(lambda leaf: leaf if next(flags) else None, opt_state)


def moved(points: Tree, params: optax.Params, change: optax.Params) -> Tree:
    """Returns the points, each moved by the change of its parameter."""
    changes = like_optimizer(points, params, jax.tree.leaves(change), None)
    return jax.tree.map(lambda x, c: x + c.astype(x.dtype), points, changes)


# An update of many arrays takes seconds to trace, and several programs ask.
@functools.lru_cache(maxsize=64)
def _flags(
    tx: optax.GradientTransformation, structure: Any, leaves: tuple[Any, ...]
) -> tuple[bool, ...]:
    """Returns for each leaf of the optimizer's state whether it is a point."""
    params = jax.tree.unflatten(structure, leaves)
    opt_state = jax.eval_shape(tx.init, params)
    owners = like_optimizer(opt_state, params, range(len(leaves)), -1)
    copies = _copies(tx, params)
    pairs = zip(jax.tree.leaves(owners), copies, strict=True)
    copied = [number is not None and own == number for own, number in pairs]
    if not any(copied):
        return tuple(copied)
    loss = jax.ShapeDtypeStruct((), jnp.float32)

    def updates(opt_state: optax.OptState, params: Tree, loss: jax.Array) -> Any:
        return updated(tx, params, opt_state, params, loss)[0]

    read = frozenset[int]().union(*sources(updates, opt_state, params, loss))
    return tuple(copy and place in read for place, copy in enumerate(copied))


def _copies(tx: optax.GradientTransformation, params: optax.Params) -> list[int | None]:
    """Returns for each leaf of a new state the number of the parameter it copies."""
    closed = jax.make_jaxpr(tx.init)(params)
    names = {variable: number for number, variable in enumerate(closed.jaxpr.invars)}
    known: dict[Any, Any] = {number: number for number in names.values()}
    for each in inlined(closed, names):
        copies = each.equation.primitive.name in _COPIES
        source = known.get(each.reads[0]) if copies else None
        known.update((name, source) for name in each.writes)
    return [known.get(name_of(names, v)) for v in closed.jaxpr.outvars]
