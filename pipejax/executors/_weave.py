"""Stages of an all-reduce, woven into the compute that hides them."""

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
    """Sums `message` over devices beside `compute(*args)`, which does not need the sum.

    The compute is cut into as many pieces as there are stages. Between two pieces, and
    after the last, stands a barrier: a stage is not waited for before its piece is
    done, and the next piece does not begin before the next stage may. Without it XLA
    puts what consumes a collective, and with it the collective's end, before the
    compute, where nothing hides it.

    Args:
      message: this device's own.
      states: the codecs' states.
      stages: the sum.
      compute: what to do meanwhile.
      *args: its arguments.

    Returns:
      The sum, the codecs' states after it, and what `compute` returned.
    """
    from ._cut import cut  # its jax.extend is slow to import

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
