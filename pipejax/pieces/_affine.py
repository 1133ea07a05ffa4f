"""Finds the arguments in which a function is not affine.

A function is affine in an argument if, with all other arguments fixed, it is a linear
function of this argument plus a constant. The update of Adam is affine in the first
moment and not affine in the second, of which it takes a root.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from pipejax.equations import Constant, inlined, name_of

# The names of operations that are affine in all operands together.
_NAMES = """
add add_any broadcast_in_dim concatenate copy copy_p cumsum expand_dims neg pad
reduce_sum reshape rev slice squeeze sub transpose
"""
_AFFINE = frozenset(_NAMES.split())


class _Depends(NamedTuple):
    """The arguments, by number, on which a value depends.

    Attributes:
      affine: Arguments in which it is affine.
      other: Arguments in which it is not.
    """

    affine: frozenset[int] = frozenset()
    other: frozenset[int] = frozenset()

    @property
    def any(self) -> frozenset[int]:
        """Returns all arguments on which the value depends."""
        return self.affine | self.other

    def joined(self, *others: "_Depends") -> "_Depends":
        """Returns what a sum of this value and others depends on."""
        other = self.other.union(*(x.other for x in others))
        return _Depends(self.affine.union(*(x.affine for x in others)) - other, other)

    def bent(self) -> "_Depends":
        """Returns what a function of the value depends on that is not affine."""
        return _Depends(frozenset(), self.any)


_NOTHING = _Depends()


def not_affine(function: Callable[..., Any], *args: Any) -> list[bool]:
    """Returns for each leaf of the arguments whether any result is not affine in it.

    The answer is on the safe side: an operation that is not known is not affine.

    Args:
      function: A function that JAX can trace.
      *args: Its arguments, or their shapes.

    Examples:
      >>> import jax.numpy as jnp
      >>> adam = lambda m, v, g: (m + g) / jnp.sqrt(v + g * g)
      >>> not_affine(adam, 1.0, 1.0, 1.0)
      [False, True, True]
    """
    closed = jax.make_jaxpr(function)(*args)
    given = [_Depends(frozenset([i])) for i in range(len(closed.jaxpr.invars))]
    results = _results(closed, given)
    bent = frozenset[int]().union(*(x.other for x in results))
    return [i in bent for i in range(len(given))]


def _results(closed: Any, given: Sequence[_Depends]) -> list[_Depends]:
    """Returns what each result of a program depends on.

    Args:
      closed: The program.
      given: What each of its arguments depends on.
    """
    inputs = [object() for _ in closed.jaxpr.invars]
    names: dict[Any, Any] = dict(zip(closed.jaxpr.invars, inputs, strict=True))
    known: dict[Any, _Depends] = dict(zip(inputs, given, strict=True))

    def depends(name: Any) -> _Depends:
        return _NOTHING if isinstance(name, Constant) else known[name]

    for equation, _, reads, writes in inlined(closed, names):
        results = _of_equation(equation, [depends(name) for name in reads])
        known.update(zip(writes, results, strict=True))
    return [depends(name_of(names, v)) for v in closed.jaxpr.outvars]


def _of_equation(equation: Any, operands: list[_Depends]) -> list[_Depends]:
    """Returns what each result of an equation depends on."""
    name, (first, *rest) = equation.primitive.name, operands or [_NOTHING]
    together = first.joined(*rest)
    if name == "optimization_barrier":
        return operands
    if name == "cond":
        branches = (_results(x, rest) for x in equation.params["branches"])
        return [first.bent().joined(*found) for found in zip(*branches, strict=True)]
    if name == "convert_element_type":
        floating = jax.numpy.issubdtype(
            equation.params["new_dtype"], jax.numpy.floating
        )
        result = first if floating else first.bent()
    elif name == "select_n":
        result = first.bent().joined(*rest)
    elif name in ("mul", "div"):
        second = rest[0] if name == "mul" else rest[0].bent()
        both = first.any & second.any
        result = first.joined(second)
        result = _Depends(result.affine - both, result.other | both)
    else:
        result = together if name in _AFFINE else together.bent()
    return [result] * len(equation.outvars)
