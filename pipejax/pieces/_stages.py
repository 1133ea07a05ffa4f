"""A program for pieces as stages: sums over devices, and the levels between them."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pipejax.collectives import Local, Sent, Stages, Transfer

from ._program import Program
from ._rules import Devices


def stages_of(program: Program, devices: Devices, *, silent: bool = False) -> Stages:
    """Returns the stages of a program after its first level.

    One all-reduce of a few numbers comes before each other level. The value before the
    first stage is what `program.run(0, ...)` returned, and after the last stage it is
    what `program.result` takes.

    Args:
      program: The program.
      devices: The devices that have the pieces.
      silent: Whether devices take their own numbers for sums, and send nothing.
    """
    stages = Stages(())
    for level in range(1, len(program.levels)):
        stages += _level(program, level, devices, silent=silent)
    return stages


def _level(program: Program, level: int, devices: Devices, *, silent: bool) -> Stages:
    """Returns the sum before a level, and the level."""
    names, count = devices.names, program.sums(level - 1)
    dtype = program.dtype(level - 1)

    def pack(value: Any, states: Any) -> tuple[Any, Any]:
        return (jnp.stack([x.astype(dtype) for x in value[:count]]), value), states

    def send(value: Any) -> Any:
        return lax.psum(value[0], names), value[1]

    def run(value: Any, states: Any) -> tuple[Any, Any]:
        total, before = value
        sums = [total[i].astype(x.dtype) for i, x in enumerate(before[:count])]
        return program.run(level, [*sums, *before[count:]]), states

    if silent:
        return Stages((Local(pack), Local(run)))
    size = dtype.itemsize * count
    sent = Sent(send, (Transfer("all-reduce", devices.count(names), size),))
    return Stages((Local(pack, encodes=True), sent, Local(run)))
