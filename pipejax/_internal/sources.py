"""Finds out from a traced program on which arguments its results depend.

For a program that every device runs, it also finds the results that may differ between
devices.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import mesh
from .jaxpr import Constant, inlined, name_of, programs_in, scan_parts
from .types import ClosedJaxpr, JaxprEqn

Sources = frozenset[int]
"""Numbers of arguments. Negative ones say that a result depends on one by a jump."""

# Operations whose result has no slope, apart from jumps.
_JUMPS = "sign round floor ceil eq ne lt le gt ge is_finite"
_FLAT = frozenset(_JUMPS.split())
# Collectives whose results are the same on all devices of their axes.
_REPLICATE = "psum", "pmax", "pmin", "all_gather"
_PLACE: Sources = frozenset([0])


class Reads(NamedTuple):
    """The arguments on which the results of a function depend.

    Attributes:
      any: Whether any result depends on a leaf; a tree for each argument.
      jumps: Whether it does so by a function that is flat apart from jumps, such as a
        sign, whose derivative does not show it; a tree for each argument.
    """

    any: Any
    jumps: Any


def reads(function: Callable[..., Any], *args: Any) -> Reads:
    """Returns the arguments on which the results of a function depend.

    Examples:
      >>> reads(lambda x, y, z: 2 * x + jnp.sign(y), 1.0, 1.0, 1.0)
      Reads(any=(True, True, False), jumps=(False, True, False))
    """
    found, structure = _joined(sources(function, *args)), jax.tree.structure(args)
    count = range(len(jax.tree.leaves(args)))
    return Reads(
        jax.tree.unflatten(structure, [i in found for i in count]),
        jax.tree.unflatten(structure, [_jump(i) in found for i in count]),
    )


def sources(function: Callable[..., Any], *args: Any) -> list[Sources]:
    """Returns for each result the arguments on which it depends, by number of leaf.

    Negative numbers say that it does so by a jump.

    Examples:
      >>> sources(lambda x, y: (2 * y, x + y, 0.0), 1.0, 1.0)
      [frozenset({1}), frozenset({0, 1}), frozenset()]
    """
    closed = jax.make_jaxpr(function)(*args)
    return _depends(closed, [frozenset([i]) for i in range(len(closed.jaxpr.invars))])


def differing(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    differs: tuple[Any, ...],
    axis_name: mesh.AxisName,
) -> Any:
    """Returns for each result whether it may differ between the devices of some axes.

    Args:
      function: Function that every device runs, inside a mapped program.
      args: Its arguments on one device.
      differs: Whether each argument may differ: a bool, or a tree of bools.
      axis_name: The axes. Sums over all of them are the same everywhere.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    every = jax.tree.leaves(jax.tree.broadcast(differs, args))
    flags = [_PLACE if x else Sources() for x in every]
    found = _depends(closed, flags, frozenset(mesh.axes(axis_name)))
    return jax.tree.unflatten(jax.tree.structure(shape), [*map(bool, found)])


def _depends(
    closed: ClosedJaxpr,
    args: Sequence[Sources],
    axes: frozenset[str] = frozenset(),
) -> list[Sources]:
    """Returns the arguments on which each result of a program depends, by number.

    `_jump(i)` is among them if the result depends on argument i by a jump. If there are
    `axes`, the place of a device on one of them counts as argument 0, and what is the
    same on all their devices depends on nothing.
    """
    names = dict(zip(closed.jaxpr.invars, (object() for _ in args), strict=True))
    known: dict[Any, Sources] = dict(zip(names.values(), args, strict=True))

    def depends(name: Any) -> Sources:
        return Sources() if isinstance(name, Constant) else known[name]

    for each in inlined(closed, names):
        found = _results(each.equation, [*map(depends, each.reads)], axes)
        known.update(zip(each.writes, found, strict=True))
    return [depends(name_of(names, v)) for v in closed.jaxpr.outvars]


def _results(
    equation: JaxprEqn, operands: list[Sources], axes: frozenset[str]
) -> Sequence[Sources]:
    """Returns the arguments on which each result of an equation depends."""
    name, results = equation.primitive.name, len(equation.outvars)
    if name == "optimization_barrier":
        return operands
    if name == "cond":
        return _of_cond(equation, operands, axes)
    if name == "scan":
        return _of_scan(equation, operands, axes)
    if name == "while":
        return _of_while(equation, operands, axes)
    programs = [*programs_in(equation)]
    if len(programs) == 1 and _has_form(programs[0], equation):  # such as a checkpoint
        return _depends(programs[0], operands, axes)
    if axes:
        over = _axes_of(equation)
        if name == "axis_index" and over & axes:
            return [_PLACE]
        if name.startswith(_REPLICATE) and axes <= over:
            return [Sources()] * results
    sources = _joined(operands)
    if _is_flat(equation):
        sources = _jumping(sources)
    return [sources] * results


def _of_cond(
    equation: JaxprEqn, operands: list[Sources], axes: frozenset[str]
) -> list[Sources]:
    first, *rest = operands
    branches = (_depends(x, rest, axes) for x in equation.params["branches"])
    return [_jumping(first).union(*found) for found in zip(*branches, strict=True)]


def _of_scan(
    equation: JaxprEqn, operands: list[Sources], axes: frozenset[str]
) -> list[Sources]:
    constants, carried, _ = scan_parts(equation)
    body, end = equation.params["jaxpr"], constants + carried

    def after(carry: list[Sources]) -> list[Sources]:
        given = [*operands[:constants], *carry, *operands[end:]]
        return _depends(body, given, axes)

    return _settled(after, operands[constants:end])


def _of_while(
    equation: JaxprEqn, operands: list[Sources], axes: frozenset[str]
) -> list[Sources]:
    params = equation.params
    start = params["cond_nconsts"]
    end = start + params["body_nconsts"]

    def after(carry: list[Sources]) -> list[Sources]:
        ends = _depends(params["cond_jaxpr"], operands[:start] + carry, axes)
        found = _depends(params["body_jaxpr"], operands[start:end] + carry, axes)
        return [x | _jumping(ends[0]) for x in found]

    return _settled(after, operands[end:])


def _settled(
    after: Callable[[list[Sources]], list[Sources]], carry: list[Sources]
) -> list[Sources]:
    """Returns the sources of a loop's results, after any number of turns.

    `after` gives those of a turn, the carry first, from those of the carry before it.
    """
    found = after(carry)
    more = [a | b for a, b in zip(carry, found, strict=False)]
    return carry + found[len(carry) :] if more == carry else _settled(after, more)


def _has_form(program: ClosedJaxpr, equation: JaxprEqn) -> bool:
    """Returns whether a program has as many arguments and results as an equation."""
    inner = program.jaxpr
    return len(inner.invars) == len(equation.invars) and len(inner.outvars) == len(
        equation.outvars
    )


def _axes_of(equation: JaxprEqn) -> frozenset[str]:
    """Returns the axes of a collective, none if it has groups on an axis."""
    params = equation.params
    if params.get("axis_index_groups") is not None:
        return frozenset()
    names = params.get("axes", params.get("axis_name", ()))
    return frozenset(mesh.axes(names))


def _is_flat(equation: JaxprEqn) -> bool:
    if not equation.outvars:  # it prints, or calls back
        return False
    result = equation.outvars[0].aval.dtype
    operands = (var.aval.dtype for var in equation.invars)
    rounds = not jnp.issubdtype(result, jnp.inexact) and any(
        jnp.issubdtype(dtype, jnp.inexact) for dtype in operands
    )
    return rounds or equation.primitive.name in _FLAT


def _jumping(sources: Sources) -> Sources:
    return sources | {_jump(i) for i in sources if i >= 0}


def _jump(argument: int) -> int:
    """Returns the number that says that a result jumps in an argument."""
    return -1 - argument


def _joined(sets: Sequence[Sources]) -> Sources:
    return Sources().union(*sets)
