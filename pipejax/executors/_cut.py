"""A function cut into pieces of about equal work.

Between two pieces one collective can be waited for and the next begun: between forward
and backward pass, between microbatches, between layers, wherever the work before and
after is most nearly equal. A `lax.scan` is itself cut where no boundary beside it will
do: L iterations become k, then L - k.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from ._flops import flops_of
from ._scan import Operation, scan_operation

# Primitives that only call a function: their equations are looked at one by one.
_CALLS = ("jit", "pjit", "closed_call", "core_call")

Piece = Callable[[list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class _Constant:
    """Stands where a name does, for a value known while tracing."""

    value: Any


def cut(
    function: Callable[..., Any], count: int, *args: Any
) -> tuple[list[Piece], Callable[[list[Any]], Any]]:
    """Cuts `function` into `count` pieces, to be run in turn.

    Args:
      function: any that JAX can trace.
      count: pieces, at least 1.
      *args: its arguments.

    Returns:
      The pieces, each from the list of arrays that the one before returned, the first
      from an empty one; and what makes the function's result of the last list.
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
    # What a piece hands on: written so far, and read by a later piece or returned.
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
    def piece(values: list[Any]) -> list[Any]:
        env = known | dict(zip(before, values, strict=True))
        for operation in part:
            outputs = operation.run(*(_value(env, name) for name in operation.reads))
            env.update(zip(operation.writes, outputs, strict=True))
        return [env[name] for name in after]

    return piece


def _points(operations: list[Operation], count: int) -> list[int]:
    """Where to cut; cuts a scan in two, in place, where that is needed."""
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
    """The equations of a program, those of functions it calls in their place.

    Names what it reads and writes in `names`, which has the program's arguments.
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
    if isinstance(variable, core.Literal):
        return _Constant(variable.val)
    return names[variable]


def _value(env: dict[Any, Any], name: Any) -> Any:
    return name.value if isinstance(name, _Constant) else env[name]


def _runner(jaxpr: Any, equation: Any) -> Callable[..., Sequence[Any]]:
    """The equation as a function of all its operands, literals too."""
    variables = [v for v in equation.invars if not isinstance(v, core.Literal)]
    alone = jaxpr.replace(
        constvars=(), invars=variables, outvars=equation.outvars, eqns=[equation]
    )
    function = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))

    def run(*values: Any) -> Sequence[Any]:
        pairs = zip(equation.invars, values, strict=True)
        return function(*(x for v, x in pairs if not isinstance(v, core.Literal)))

    return run
