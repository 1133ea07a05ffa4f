"""A program for pieces as stages: sums over devices, and the levels between them."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pipejax._internal.types import CodecStates, Tree
from pipejax.collectives import Local, Sent, Stages, Transfer

from ._program import Program
from ._rules import Devices


def stages_of(program: Program, devices: Devices, *, silent: bool = False) -> Stages:
    """Returns the stages of a program after its first level.

    One all-reduce of each dtype comes before each other level. The value before the
    first stage is what `program.run(0, ...)` returned, and after the last stage it is
    what `program.result` takes.

    If `silent`, devices take their own numbers for sums, and send nothing.
    """
    stages = Stages(())
    for level in range(1, len(program.levels)):
        stages += _level(program, level, devices, silent=silent)
    return stages


def _level(program: Program, level: int, devices: Devices, *, silent: bool) -> Stages:
    """Returns the sum before a level, and the level."""
    names, forms = devices.names, program.sums(level - 1)
    dtypes = sorted({form.dtype for form in forms}, key=lambda dtype: dtype.name)

    def pack(value: Tree, states: CodecStates) -> tuple[Any, Any]:
        own = value[: len(forms)]
        packed = [
            jnp.concatenate([x.reshape(-1) for x in own if x.dtype == dtype])
            for dtype in dtypes
        ]
        return (packed, value), states

    def send(value: Tree) -> Any:
        return [lax.psum(x, names) for x in value[0]], value[1]

    def run(value: Tree, states: CodecStates) -> tuple[Any, Any]:
        totals, before = value
        left, sums = dict(zip(dtypes, totals, strict=True)), []
        for form in forms:
            own, left[form.dtype] = jnp.split(left[form.dtype], [form.size])
            sums.append(own.reshape(form.shape))
        return program.run(level, [*sums, *before[len(forms) :]]), states

    if silent:
        return Stages((Local(pack), Local(run)))
    transfers = tuple(
        Transfer(
            "all-reduce",
            devices.count(names),
            dtype.itemsize * sum(form.size for form in forms if form.dtype == dtype),
        )
        for dtype in dtypes
    )
    return Stages((Local(pack, encodes=True), Sent(send, transfers), Local(run)))
