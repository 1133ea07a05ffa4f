"""Weaves the stages of an exchange into the compute that hides them."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from pipejax._internal.keys import as_numbers
from pipejax._internal.shards import over_own_axes
from pipejax._internal.types import CodecStates, Tree
from pipejax.collectives import Stages


def interleave(
    value: Tree,
    states: CodecStates,
    stages: Stages,
    compute: Callable[..., Any],
    *args: Any,
    early: float = 0.5,
) -> tuple[Any, Any, Any]:
    """Runs stages beside `compute(*args)`, which does not need what they return.

    The compute is cut into as many segments as there are stages. Stage i runs beside
    segment i, and a barrier stands after the two: the next stage and the next segment
    begin only when both are done. Without the barrier, XLA puts the operation that
    consumes a collective before the compute. The collective would then end there too,
    where nothing hides it.

    A segment is the longer, the longer its stage sends (`Stages.relative_times`). A
    stage that sends a few numbers still gets a hundredth of what an equal share would
    be.

    `early` is the share of the compute beside the first half of the exchange. The
    results are the value and the codec states after the last stage, and what `compute`
    returned.
    """
    from ._segments import segments_of  # imports jax.extend, which is slow

    barrier = functools.partial(over_own_axes, lax.optimization_barrier)
    segments, result = segments_of(compute, fractions(stages, early), *args)
    payload: Any = value, states
    values: list[Any] = []
    for i, segment in enumerate(segments):
        if i < len(stages.stages):
            payload = stages.stages[i](payload)
        values = segment(values)
        payload, values = as_numbers(barrier, (payload, values))
    value, after = stages.finish(payload)
    return value, after, result(values)


def fractions(stages: Stages, early: float = 0.5) -> list[float]:
    """Returns the share of the compute beside each stage, by how long it sends."""
    sent = stages.relative_times
    if not sum(sent):
        return [1 / max(1, len(sent))] * max(1, len(sent))
    least = sum(sent) / len(sent) / 100
    ends = np.cumsum([0.0, *(max(size, least) for size in sent)])
    places = np.interp(ends / ends[-1], [0, 0.5, 1], [0, early, 1])
    return np.diff(places).tolist()
