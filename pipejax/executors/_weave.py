"""Stages of an all-reduce, woven into the compute that hides them."""

from collections.abc import Callable
from typing import Any

from jax import lax

from pipejax.buckets import Buckets
from pipejax.collectives import Stages
from pipejax.message import parted


def weave(
    reductions: dict[str, Stages],
    buckets: Buckets,
    states: Any,
    compute: Callable[..., Any],
    *args: Any,
) -> tuple[Buckets, Any, Any]:
    """Sums `buckets` over devices beside `compute(*args)`, which has no part in them.

    The compute is cut into as many pieces as there are stages. Between two pieces, and
    after the last, a barrier: a stage is not waited for before its piece is done, and
    the next piece does not begin before the next stage may. Without it XLA puts what
    consumes a collective, and with it the collective's end, before the compute, where
    nothing hides it.

    Args:
      reductions: the stages for each bucket.
      buckets: this device's own.
      states: the codecs', for each.
      compute: what to do meanwhile.
      *args: its arguments.

    Returns:
      The sums, the codecs' states after them, and what `compute` returned.
    """
    from ._cut import cut  # its jax.extend is slow to import

    stages = {name: reduction.stages for name, reduction in reductions.items()}
    pieces, result = cut(compute, max(1, *map(len, stages.values())), *args)
    payloads: dict[str, Any] = {k: (x, states[k]) for k, x in buckets.items()}
    values: list[Any] = []
    for i, piece in enumerate(pieces):
        for name in stages:
            if i < len(stages[name]):
                payloads[name] = stages[name][i](payloads[name])
        values = piece(values)
        payloads, values = lax.optimization_barrier((payloads, values))
    sums, after = parted({k: reductions[k].finish(x) for k, x in payloads.items()})
    return sums, after, result(values)
