"""Finds results of a program that are zero, whatever its arguments are."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .jaxpr import Constant, inlined, name_of
from .keys import is_key
from .types import ClosedJaxpr, JaxprEqn

# Primitives that have a result for each operand, which is zero if the operand is.
_OF_EACH = {"optimization_barrier", "psum", "psum_invariant", "pmax", "pmin"}
# Primitives whose result is zero if their first operand is.
_OF_FIRST = {
    *("abs", "neg", "sign", "sqrt", "square", "tanh", "real", "imag", "copy", "div"),
    *("broadcast_in_dim", "reshape", "transpose", "squeeze", "rev", "slice"),
    *("dynamic_slice", "reduce_sum", "cumsum"),
    *("convert_element_type", "reduce_precision", "stop_gradient"),
}
_OF_ANY = {"mul", "and", "dot_general"}  # of finite numbers
_OF_ALL = {"add", "sub", "max", "min", "or", "concatenate", "pad", "add_any"}


def zeros(function: Callable[..., Any], *args: Any) -> list[bool]:
    """Returns for each result whether it is known to be zero.

    What is multiplied by zero is taken to be finite, and no divisor to be zero.

    Examples:
      >>> zeros(lambda x: (0 * x, jax.numpy.where(x > 1, 0, -0.0), x - x), 1.0)
      [True, True, False]
    """
    closed = jax.make_jaxpr(function)(*args)
    return _zeros(closed, [False] * len(closed.jaxpr.invars))


def _zeros(closed: ClosedJaxpr, args: Sequence[bool]) -> list[bool]:
    names = dict(zip(closed.jaxpr.invars, (object() for _ in args), strict=True))
    known = dict(zip(names.values(), args, strict=True))

    def zero(name: Any) -> bool:
        return _is_zero(name.value) if isinstance(name, Constant) else known[name]

    for each in inlined(closed, names):
        operands = [*map(zero, each.reads)]
        known.update(zip(each.writes, _results(each.equation, operands), strict=True))
    return [zero(name_of(names, variable)) for variable in closed.jaxpr.outvars]


def _is_zero(value: Any) -> bool:
    """Returns whether a constant is zero, `False` for keys and what lies elsewhere."""
    if isinstance(value, jax.core.Tracer) or is_key(value):
        return False
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return False
    with jax.transfer_guard("allow"):
        return not np.any(np.asarray(value))


def _results(equation: JaxprEqn, operands: Sequence[bool]) -> list[bool]:
    name, count = equation.primitive.name, len(equation.outvars)
    if name in _OF_EACH:
        return [*operands]
    if name == "cond":
        branches = (_zeros(x, operands[1:]) for x in equation.params["branches"])
        return [all(found) for found in zip(*branches, strict=True)]
    if name == "select_n":
        return [all(operands[1:])]
    found = (
        (name in _OF_FIRST and operands[0])
        or (name in _OF_ANY and any(operands))
        or (name in _OF_ALL and all(operands))
    )
    return [found] * count
