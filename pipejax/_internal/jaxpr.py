"""Reads a traced program as a flat list of equations, whose values have unique names.

In a jaxpr, an equation may call a function, whose equations have variables of their
own. The functions here replace each call by the equations of the function.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .types import ClosedJaxpr, JaxprEqn

# Primitives that only call a function. The equations of the function replace them.
_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """Takes the place of a name, for a value that is known while tracing."""

    value: Any


class Equation(NamedTuple):
    """An equation of a program, with unique names for what it reads and writes."""

    equation: Any
    jaxpr: Any
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]


def inlined(closed: Any, names: dict[Any, Any]) -> Iterator[Equation]:
    """Yields the equations of a program, with the functions that it calls inlined.

    `names` has the arguments of the program at first. A name is added for each value
    that the program reads or writes.
    """
    jaxpr = closed.jaxpr
    constants = zip(jaxpr.constvars, closed.consts, strict=True)
    names.update((v, Constant(value)) for v, value in constants)
    for equation in jaxpr.eqns:
        reads = tuple(name_of(names, v) for v in equation.invars)
        if equation.primitive.name in _CALLS:
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            # The function has variables of its own, which may be the same as in another
            # call of it. Their names are therefore kept apart.
            inside = dict(zip(inner.jaxpr.invars, reads, strict=True))
            yield from inlined(inner, inside)
            returned = [name_of(inside, v) for v in inner.jaxpr.outvars]
            names.update(zip(equation.outvars, returned, strict=True))
            continue
        writes = tuple(object() for _ in equation.outvars)
        names.update(zip(equation.outvars, writes, strict=True))
        yield Equation(equation, jaxpr, reads, writes)


def programs_in(equation: JaxprEqn) -> Iterator[ClosedJaxpr]:
    """Yields the programs that an equation runs, such as the branches of a `cond`."""
    from jax.extend import core  # is slow to import

    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item
            elif isinstance(item, core.Jaxpr):
                yield core.ClosedJaxpr(item, ())


def forwarded(closed: ClosedJaxpr) -> list[int | None]:
    """Returns for each result of a program the argument that it is, by number.

    It is `None` for all others. Checkpoints and scans, too, may hand on what they read.
    """
    arguments = closed.jaxpr.invars
    names = dict(zip(arguments, range(len(arguments)), strict=True))
    same: dict[Any, Any] = {}
    for each in inlined(closed, names):
        for place, source in _handed_on(each.equation).items():
            found = each.reads[source]
            same[each.writes[place]] = same.get(found, found)
    results = [name_of(names, variable) for variable in closed.jaxpr.outvars]
    results = [same.get(name, name) for name in results]
    return [name if isinstance(name, int) else None for name in results]


def _handed_on(equation: JaxprEqn) -> dict[int, int]:
    """Returns the results of an equation that are operands of it, by number."""
    name = equation.primitive.name
    if name == "optimization_barrier":
        return {i: i for i in range(len(equation.outvars))}
    if name not in ("remat2", "scan"):
        return {}
    (inner,) = programs_in(equation)
    pairs = {i: j for i, j in enumerate(forwarded(inner)) if j is not None}
    if name == "remat2":
        return pairs
    # The operands are constants, carries and slices, and the results carries and
    # slices. A carry must come back in its own place.
    constants, carries, _ = scan_parts(equation)
    first = constants + carries
    return {
        i: j
        for i, j in pairs.items()
        if (j == constants + i if i < carries else j >= first)
    }


def scan_parts(equation: JaxprEqn) -> tuple[int, int, int]:
    """Returns how many operands of a scan are constants, carries and slices."""
    # Slices and stacked results have one axis more than the body sees. Each version of
    # JAX names these numbers otherwise.
    body = equation.params["jaxpr"].jaxpr
    along = _stacked(equation.invars, body.invars)
    carried = len(equation.outvars) - _stacked(equation.outvars, body.outvars)
    return len(equation.invars) - carried - along, carried, along


def _stacked(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """Returns how many variables have another shape inside a scan than outside."""
    pairs = zip(outside, inside, strict=True)
    return sum(a.aval.shape != b.aval.shape for a, b in pairs)


def name_of(names: dict[Any, Any], variable: Any) -> Any:
    return Constant(variable.val) if _is_literal(variable) else names[variable]


def value_of(env: dict[Any, Any], name: Any) -> Any:
    return name.value if isinstance(name, Constant) else env[name]


def runner(found: Equation) -> Callable[..., Sequence[Any]]:
    """Returns an equation as a function of its operands, literals included."""
    from jax.extend import core  # is slow to import

    equation = found.equation
    variables = [v for v in equation.invars if not _is_literal(v)]
    alone = found.jaxpr.replace(
        constvars=(), invars=variables, outvars=equation.outvars, eqns=[equation]
    )
    function = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))

    def run(*values: Any) -> Sequence[Any]:
        pairs = zip(equation.invars, values, strict=True)
        return function(*(x for v, x in pairs if not _is_literal(v)))

    return run


def _is_literal(variable: Any) -> bool:
    return hasattr(variable, "val")
