"""Finds the collectives that the loss or the optimizer has of its own.

On CPU, the communication thread launches the collectives of the exchange. Every process
must launch its collectives in the same order, but two threads have no common order. A
collective between processes in another program could therefore meet a collective of the
thread. Gloo then ends the process, or mixes up data of the same size without an error.

Collectives inside a process cause no such problem. Neither do the collectives of
accelerators, which are independent of those of the CPUs.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from pipejax._internal.hlo import collective_groups
from pipejax._internal.structures import form_of


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
    for found in collective_groups(program, mesh):
        if found.crosses_processes:
            raise OwnCollectiveError(found)


@dataclasses.dataclass(frozen=True, eq=False)
class OwnCollectives:
    """Checks programs that run beside the communication thread."""

    mesh: Mesh
    # Programs found to have no collective of their own, with their arguments' form.
    _checked: set[Any] = dataclasses.field(default_factory=set)

    def check(self, program: jax.stages.Wrapped, *args: Any) -> None:
        """Raises an `OwnCollectiveError` if a program has one between processes.

        The check is made on CPUs of several processes only. It compiles the program, as
        the first call would, before the program is dispatched. For arguments of another
        form, a program is compiled and checked again.
        """
        if not spans_cpu_processes(self.mesh):
            return
        form = form_of(args)
        if (program, form) in self._checked:
            return
        check_no_own(program.lower(*args).compile(), self.mesh)
        self._checked.add((program, form))
