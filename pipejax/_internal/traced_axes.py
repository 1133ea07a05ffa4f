"""Finds the mesh axes over which a traced function communicates or splits arrays."""

from collections.abc import Iterator
from typing import Any

import jax

from .mesh import axes


def collective_axes(function: Any, *args: Any) -> set[str]:
    equations = _equations(jax.make_jaxpr(function)(*args))
    return {name for equation in equations for name in _axes_of(equation)}


def constrained_axes(function: Any, *args: Any) -> set[str]:
    """Returns the axes over which a function tells XLA to split arrays."""
    found: set[str] = set()
    for equation in _equations(jax.make_jaxpr(function)(*args)):
        if equation.primitive.name == "sharding_constraint":
            found.update(_names(equation.params["sharding"]))
        found.update(equation.params.get("manual_axes", ()))
        for value in equation.outvars:  # along axes of type Explicit
            found.update(_names(getattr(value.aval, "sharding", None)))
    return found


def _names(sharding: Any) -> Iterator[str]:
    # Other entries leave a dimension whole, or to XLA.
    for entry in getattr(sharding, "spec", ()):
        if isinstance(entry, str | tuple):
            yield from axes(entry)


def _axes_of(equation: Any) -> Iterator[str]:
    names = equation.params.get("axes", equation.params.get("axis_name", ()))
    names = (names,) if isinstance(names, str) else names or ()
    # This equation names an axis, and sends nothing along it.
    if equation.primitive.name != "axis_index":
        yield from (name for name in names if isinstance(name, str))


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in jax.tree.leaves(
            tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from _equations(value)
