"""Weaves the stages of an all-reduce into the compute that hides them."""

from collections.abc import Callable
from typing import Any

from jax import lax

from pipejax.collectives import Stages
from pipejax.message import Message, message_of, summands


def weave(
    message: Message,
    states: Any,
    stages: Stages,
    compute: Callable[..., Any],
    *args: Any,
) -> tuple[Message, Any, Any]:
    """Sums a message over devices beside `compute(*args)`, which does not need the sum.

    The compute is cut into as many pieces as there are stages. Stage i runs beside
    piece i, and a barrier stands after the two: the next stage and the next piece begin
    only when both are done. Without the barrier, XLA puts the operation that consumes a
    collective before the compute. The collective would then end there too, where
    nothing hides it.

    Args:
      message: The message of this device.
      states: The codec states of this device before the sum.
      stages: The stages that sum messages of this form.
      compute: The function to run beside the stages.
      *args: Its arguments.

    Returns:
      The sum, the codec states after it, and what `compute` returned.
    """
    from ._cut import cut  # imports jax.extend, which is slow

    pieces, result = cut(compute, max(1, len(stages.stages)), *args)
    payload: Any = summands(message), states
    values: list[Any] = []
    for i, piece in enumerate(pieces):
        if i < len(stages.stages):
            payload = stages.stages[i](payload)
        values = piece(values)
        payload, values = lax.optimization_barrier((payload, values))
    total, after = stages.finish(payload)
    return message_of(total, message), after, result(values)
