"""Collectives that the loss or the optimizer has of its own.

On CPU, the communication thread launches the collectives of the exchange. Every process
must launch its collectives in the same order, and two threads have none. A collective
between processes in another program could therefore meet those of the thread: Gloo then
ends the process, or mixes up messages of the same size without an error.

Collectives inside a process are not concerned, nor are those of accelerators, which
travel beside the CPUs'.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from pipejax.collectives import Transfer


class OwnCollectiveError(ValueError):
    """A program that must run beside the communication thread has a collective.

    Attributes:
      reason: which collective, as the reason to choose another executor.
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
    """Returns whether the mesh is of CPUs of several processes."""
    return mesh.is_multi_process and mesh.devices.flat[0].platform == "cpu"


def check_no_own(program: jax.stages.Compiled, mesh: Mesh) -> None:
    """Raises an `OwnCollectiveError` if a collective of `program` crosses processes."""
    # `overlap` measures train steps, and so imports this package.
    from pipejax.overlap import collective_groups

    for found in collective_groups(program, mesh):
        if found.crosses_processes:
            raise OwnCollectiveError(found)


def own_transfers(program: Any, *args: Any) -> tuple[Transfer, ...]:
    """Returns what each collective of a jitted program moves, as often as it runs.

    Compiles the program if it has any.
    """
    from pipejax.overlap import inspect

    if not collective_axes(program, *args):
        return ()
    return tuple(
        Transfer(found.kind, found.group_size, int(found.bytes))
        for found in inspect(program, *args).collectives
        for _ in range(found.times)
    )


def collective_axes(function: Any, *args: Any) -> set[str]:
    """Returns the names of the axes over which a function has collectives."""
    equations = _equations(jax.make_jaxpr(function)(*args))
    return {name for equation in equations for name in _axes_of(equation)}


def _axes_of(equation: Any) -> Iterator[str]:
    """Yields the axes of the mesh over which an equation of a jaxpr talks."""
    names = equation.params.get("axes", equation.params.get("axis_name", ()))
    names = (names,) if isinstance(names, str) else names or ()
    if equation.primitive.name != "axis_index":
        yield from (name for name in names if isinstance(name, str))


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, and of all jaxprs inside."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in jax.tree.leaves(
            tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from _equations(value)
