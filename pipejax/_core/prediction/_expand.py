r"""Expands a function of whole arrays to first order, element by element.

Let f be a function of trees of arrays, whose result has the form of each of them, such
as the update of an optimizer as a function of the gradients. Close to m,

$$f(g) \approx f(m) + P (g - m), P_i = \partial f_i / \partial g_i$$

P is the diagonal of the derivative. Sums over arrays, such as a norm by which gradients
are clipped, are held at their values at m. If f mixes elements in other ways, as the
matrix products of Muon do, the diagonal does not describe it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax._core.partitioned import acts_elementwise
from pipejax._internal.jaxpr import (
    Constant,
    inlined,
    name_of,
    programs_in,
    runner,
    value_of,
)
from pipejax._internal.types import ClosedJaxpr, JaxprEqn

# Operations that keep the order of elements, if they keep their number.
_NAMES = "reshape squeeze expand_dims broadcast_in_dim reshard sharding_constraint"
_SAME_ORDER = frozenset(_NAMES.split())
_MIXED = -1  # in place of the number of a leaf: elements of several places


def expanded(
    function: Callable[..., Any], points: Sequence[Any]
) -> tuple[Any, tuple[Any, ...]]:
    """Returns a function's value, and its derivatives element by element.

    The result of `function` has the form of each of its arguments. Returned are `f(m)`
    at the `points`, and for each argument the tree P.
    """
    held, found = _held(function, points), []
    for place, point in enumerate(points):

        def at(x: Any, place: int = place) -> Any:
            return held(*points[:place], x, *points[place + 1 :])

        ones = jax.tree.map(jnp.ones_like, point)
        found.append(jax.jvp(at, (point,), (ones,)))
    values, slopes = zip(*found, strict=True)
    return values[0], slopes


def works_elementwise(
    function: Callable[..., Any], points: Sequence[Any], *others: Any
) -> bool:
    """Returns whether `expanded` describes a function of gradients.

    `points` is its first argument, a list of trees of the form of its result.
    """
    closed = jax.make_jaxpr(function)(points, *others)
    leaves = [i for point in points for i in range(len(jax.tree.leaves(point)))]
    rest = len(closed.jaxpr.invars) - len(leaves)
    found = _origins(closed, [*leaves, *[None] * rest])
    return all(o is None or o == i for i, o in enumerate(found))


def has_sums(function: Callable[..., Any], *args: Any) -> bool:
    """Returns whether a function sums over an array, or finds its largest element.

    Examples:
      >>> has_sums(lambda x: x / jnp.linalg.norm(x), jnp.ones(2))
      True
    """
    return _program_sums(jax.make_jaxpr(function)(*args))


def _program_sums(closed: ClosedJaxpr) -> bool:
    names = {var: object() for var in closed.jaxpr.invars}
    equations = [each.equation for each in inlined(closed, names)]
    inner = (x for each in equations for x in programs_in(each))
    return any(map(_sums_up, equations)) or any(map(_program_sums, inner))


def _held(function: Callable[..., Any], points: Sequence[Any]) -> Callable[..., Any]:
    """Returns a function whose sums over arrays have no derivative."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*points)
    run = _without_sums(closed)

    def held(*args: Any) -> Any:
        return jax.tree.unflatten(
            jax.tree.structure(shape), run(*jax.tree.leaves(args))
        )

    return held


def _without_sums(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns a traced program as a function whose sums have no derivative."""

    def run(*args: Any) -> list[Any]:
        names = dict(zip(closed.jaxpr.invars, (object() for _ in args), strict=True))
        env = dict(zip(names.values(), args, strict=True))
        for each in inlined(closed, names):
            values: list[Any] = [value_of(env, name) for name in each.reads]
            if each.equation.primitive.name == "cond":
                index, *operands = values
                branches = each.equation.params["branches"]
                results = lax.switch(index, [*map(_without_sums, branches)], *operands)
            else:
                if _sums_up(each.equation):
                    values = [*map(lax.stop_gradient, values)]
                results = runner(each)(*values)
            env.update(zip(each.writes, results, strict=True))
        return [value_of(env, name_of(names, v)) for v in closed.jaxpr.outvars]

    return run


def _origins(closed: ClosedJaxpr, args: Sequence[int | None]) -> list[int | None]:
    """Returns the leaf on whose elements each result depends, place by place.

    A leaf is given by its number. `None` stands for no leaf, or for sums over arrays
    alone, and `_MIXED` for elements of several places.
    """
    names = dict(zip(closed.jaxpr.invars, (object() for _ in args), strict=True))
    known: dict[Any, int | None] = dict(zip(names.values(), args, strict=True))

    def origin(name: Any) -> int | None:
        return None if isinstance(name, Constant) else known[name]

    for each in inlined(closed, names):
        found = _origins_of(each.equation, [*map(origin, each.reads)])
        for name, var, leaf in zip(
            each.writes, each.equation.outvars, found, strict=True
        ):
            floats = jnp.issubdtype(var.aval.dtype, jnp.inexact)
            known[name] = leaf if floats else None
    return [origin(name_of(names, v)) for v in closed.jaxpr.outvars]


def _origins_of(equation: JaxprEqn, operands: list[int | None]) -> list[int | None]:
    """Returns the leaf on whose elements each result of an equation depends."""
    name, results = equation.primitive.name, equation.outvars
    if name == "cond":
        branches = (_origins(x, operands[1:]) for x in equation.params["branches"])
        return [_joined(found) for found in zip(*branches, strict=True)]
    if name == "optimization_barrier":
        return operands
    leaf = _joined(operands)
    if leaf is None or _sums_up(equation):
        return [None] * len(results)
    sizes = [
        var.aval.size
        for var, o in zip(equation.invars, operands, strict=True)
        if o is not None
    ]
    keeps = acts_elementwise(equation) or name in _SAME_ORDER
    return [
        leaf if keeps and {*sizes} == {var.aval.size} else _MIXED for var in results
    ]


def _joined(leaves: Sequence[int | None]) -> int | None:
    """Returns the only leaf among several, `None` without any, or `_MIXED`."""
    found = {leaf for leaf in leaves if leaf is not None}
    return None if not found else found.pop() if len(found) == 1 else _MIXED


def _sums_up(equation: JaxprEqn) -> bool:
    """Returns whether an equation sums over an array, or finds its largest element."""
    name = equation.primitive.name
    if name == "dot_general":
        return not equation.outvars[0].aval.ndim
    return name.startswith(("reduce_", "arg")) and name != "reduce_precision"
