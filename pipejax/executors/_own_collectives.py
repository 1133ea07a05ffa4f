"""Finds the collectives that the loss or the optimizer has of its own.

On CPU, the communication thread launches the collectives of the exchange. Every process
must launch its collectives in the same order, but two threads have no common order. A
collective between processes in another program could therefore meet a collective of the
thread. Gloo then ends the process, or mixes up data of the same size without an error.

Collectives inside a process cause no such problem. Neither do the collectives of
accelerators, which are independent of those of the CPUs.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from pipejax._internal.mesh import axes
from pipejax.collectives import Transfer


class OwnCollectiveError(ValueError):
    """Raised if a program that runs beside the communication thread has a collective.

    Attributes:
      reason: Which collective the program has, as the reason for another executor.
    """

    def __init__(self, found: Any) -> None:
        self.reason = (
            f"`loss_fn` or `tx` has a collective between processes, {found.kind}"
            f" ({found.op_name}), which must not run beside a communication thread"
        )
        super().__init__(
            "`executor` must not be 'host' on CPUs of several processes where"
            f" {self.reason}. Choose executor='fused', or 'auto', which does."
        )


def spans_cpu_processes(mesh: Mesh) -> bool:
    """Returns whether the mesh consists of CPUs of several processes."""
    return mesh.is_multi_process and mesh.devices.flat[0].platform == "cpu"


def check_no_own(program: jax.stages.Compiled, mesh: Mesh) -> None:
    """Raises an `OwnCollectiveError` if a collective of `program` crosses processes."""
    # Imported here because `overlap`, which measures train steps, imports this package.
    from pipejax.overlap import collective_groups

    for found in collective_groups(program, mesh):
        if found.crosses_processes:
            raise OwnCollectiveError(found)


def own_transfers(
    program: Any, *args: Any, sharded: bool = False
) -> tuple[Transfer, ...]:
    """Returns what the collectives of a jitted program move, each as often as it runs.

    The program is compiled only if it has collectives.

    Args:
      program: The jitted function.
      *args: Its arguments, or their shapes.
      sharded: Whether XLA may add collectives, because groups shard the model.

    Returns:
      A `Transfer` for each execution of a collective.
    """
    from pipejax.overlap import inspect

    if not sharded and not collective_axes(program, *args):
        return ()
    return tuple(
        Transfer(found.kind, found.group_size, int(found.bytes))
        for found in inspect(program, *args).collectives
        for _ in range(found.times)
    )


def collective_axes(function: Any, *args: Any) -> set[str]:
    """Returns the names of the axes over which a function has collectives.

    Args:
      function: A function that JAX can trace.
      *args: Its arguments, or their shapes.

    Returns:
      The names. `lax.axis_index` is not a collective, and adds no name.
    """
    equations = _equations(jax.make_jaxpr(function)(*args))
    return {name for equation in equations for name in _axes_of(equation)}


def constrained_axes(function: Any, *args: Any) -> set[str]:
    """Returns the axes over which a function tells XLA to split arrays.

    Args:
      function: A function that JAX can trace.
      *args: Its arguments, or their shapes.
    """
    found: set[str] = set()
    for equation in _equations(jax.make_jaxpr(function)(*args)):
        if equation.primitive.name == "sharding_constraint":
            spec = getattr(equation.params["sharding"], "spec", ())
            found.update(name for entry in spec if entry for name in axes(entry))
        found.update(equation.params.get("manual_axes", ()))
    return found


def _axes_of(equation: Any) -> Iterator[str]:
    """Yields the mesh axes over which an equation of a jaxpr communicates."""
    names = equation.params.get("axes", equation.params.get("axis_name", ()))
    names = (names,) if isinstance(names, str) else names or ()
    if equation.primitive.name != "axis_index":
        yield from (name for name in names if isinstance(name, str))


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, and of all jaxprs inside it."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in jax.tree.leaves(
            tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from _equations(value)
