"""Cuts a function into pieces of about equal work.

Where one piece ends, an executor can wait for one collective and start the next. A cut
may lie between any two operations, for example between forward and backward pass,
between microbatches, or between layers. The places are chosen so that the pieces are
as nearly equal as possible. If no place between operations is near enough, a `lax.scan`
is itself cut: L iterations become k, then L - k.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from ._flops import flops_of
from ._scan import Operation, scan_operation

# Primitives that only call a function. The equations of the function replace them.
_CALLS = ("jit", "pjit", "closed_call", "core_call")

Piece = Callable[[list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class _Constant:
    """Takes the place of a name, for a value that is known while tracing."""

    value: Any


def cut(
    function: Callable[..., Any], count: int, *args: Any
) -> tuple[list[Piece], Callable[[list[Any]], Any]]:
    """Cuts `function` into `count` pieces, to be run one after another.

    Args:
      function: A function that JAX can trace.
      count: Number of pieces, at least 1.
      *args: Arguments of the function.

    Returns:
      The pieces, and a function that makes the result of `function` from the list that
      the last piece returns. Each piece is a function of the list of arrays that the
      piece before it returned. The first piece is given an empty list.
    """
    if count == 1:
        whole = function(*args)
        leaves, tree = jax.tree.flatten(whole)
        return [lambda _: leaves], lambda values: jax.tree.unflatten(tree, values)
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    jaxpr, tree = closed.jaxpr, jax.tree.structure(shape)
    names: dict[Any, Any] = {v: object() for v in jaxpr.invars}
    known = {
        names[v]: x for v, x in zip(jaxpr.invars, jax.tree.leaves(args), strict=True)
    }
    operations = list(_operations(closed, names))
    results = tuple(_name(names, v) for v in jaxpr.outvars)
    points = _points(operations, count)
    parts = [operations[a:b] for a, b in itertools.pairwise(points)]
    # A piece hands on every value that is written so far, and that a later piece reads
    # or the function returns.
    written: list[Any] = []
    handed: list[list[Any]] = [[]]
    for i, part in enumerate(parts):
        written += [name for operation in part for name in operation.writes]
        later = {n for rest in parts[i + 1 :] for op in rest for n in op.reads}
        wanted = later | {n for n in results if not isinstance(n, _Constant)}
        handed.append([name for name in written if name in wanted])
    pieces = [
        _piece(part, known, before, after)
        for part, (before, after) in zip(parts, itertools.pairwise(handed), strict=True)
    ]

    def result(values: list[Any]) -> Any:
        env = known | dict(zip(handed[-1], values, strict=True))
        return jax.tree.unflatten(tree, [_value(env, name) for name in results])

    return pieces, result


def _piece(
    part: list[Operation], known: dict[Any, Any], before: list[Any], after: list[Any]
) -> Piece:
    """Returns a function that runs the operations of one piece.

    Args:
      part: The operations.
      known: Values of the arguments of the function that is cut, by name.
      before: Names of the values that the piece is given.
      after: Names of the values that the piece returns.
    """

    def piece(values: list[Any]) -> list[Any]:
        env = known | dict(zip(before, values, strict=True))
        for operation in part:
            outputs = operation.run(*(_value(env, name) for name in operation.reads))
            env.update(zip(operation.writes, outputs, strict=True))
        return [env[name] for name in after]

    return piece


def _points(operations: list[Operation], count: int) -> list[int]:
    """Returns the indices in `operations` at which the pieces begin, and the end.

    Cuts a scan in two, in place, if both ends of the scan are more than half a piece
    away from where a piece should begin.
    """
    total = sum(operation.flops for operation in operations)
    points = [0]
    for i in range(1, count):
        target, reached, index = total * i / count, 0.0, 0
        while index < len(operations) and reached + operations[index].flops <= target:
            reached += operations[index].flops
            index += 1
        if index < len(operations) and total:
            operation = operations[index]
            inside = (target - reached) / operation.flops
            off = min(inside, 1 - inside) * operation.flops
            if off > total / (2 * count) and operation.halves is not None:
                operations[index : index + 1] = operation.halves(inside)
                index += 1
            elif inside > 0.5:
                index += 1
        points.append(max(index, points[-1]))
    return [*points, len(operations)]


def _operations(closed: Any, names: dict[Any, Any]) -> Iterator[Operation]:
    """Yields the operations of a program, with the functions that it calls inlined.

    Args:
      closed: The program.
      names: Names of its variables. At first, these are the arguments of the program. A
        name is added for each value that the program reads or writes.
    """
    jaxpr = closed.jaxpr
    constants = zip(jaxpr.constvars, closed.consts, strict=True)
    names.update((v, _Constant(value)) for v, value in constants)
    for equation in jaxpr.eqns:
        reads = tuple(_name(names, v) for v in equation.invars)
        if equation.primitive.name in _CALLS:
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            inside = dict(zip(inner.jaxpr.invars, reads, strict=True))
            yield from _operations(inner, inside)
            returned = [_name(inside, v) for v in inner.jaxpr.outvars]
            names.update(zip(equation.outvars, returned, strict=True))
            continue
        writes = tuple(object() for _ in equation.outvars)
        names.update(zip(equation.outvars, writes, strict=True))
        if equation.primitive.name == "scan":
            yield scan_operation(equation, reads, writes)
        else:
            run = _runner(jaxpr, equation)
            yield Operation(flops_of(equation), reads, writes, run)


def _name(names: dict[Any, Any], variable: Any) -> Any:
    """Returns the name of a variable, or a `_Constant` for a literal."""
    if isinstance(variable, core.Literal):
        return _Constant(variable.val)
    return names[variable]


def _value(env: dict[Any, Any], name: Any) -> Any:
    """Returns the value that a name or a `_Constant` stands for."""
    return name.value if isinstance(name, _Constant) else env[name]


def _runner(jaxpr: Any, equation: Any) -> Callable[..., Sequence[Any]]:
    """Returns an equation as a function of all its operands, including literals."""
    variables = [v for v in equation.invars if not isinstance(v, core.Literal)]
    alone = jaxpr.replace(
        constvars=(), invars=variables, outvars=equation.outvars, eqns=[equation]
    )
    function = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))

    def run(*values: Any) -> Sequence[Any]:
        pairs = zip(equation.invars, values, strict=True)
        return function(*(x for v, x in pairs if not isinstance(v, core.Literal)))

    return run
