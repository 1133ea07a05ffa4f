"""Stages of an all-reduce, woven into the compute that hides them."""

from collections.abc import Callable
from typing import Any

from jax import lax

from pipejax.buckets import Buckets
from pipejax.collectives import Stages

from ._cut import cut


def weave(
    reductions: dict[str, Stages],
    buckets: Buckets,
    compute: Callable[..., Any],
    *args: Any,
) -> tuple[Buckets, Any]:
    """Sums `buckets` over devices beside `compute(*args)`, which has no part in them.

    The compute is cut into as many pieces as there are stages. Between two pieces, and
    after the last, a barrier: a stage is not waited for before its piece is done, and
    the next piece does not begin before the next stage may. Without it XLA puts what
    consumes a collective, and with it the collective's end, before the compute, where
    nothing hides it.

    Args:
      reductions: the stages for each bucket.
      buckets: this device's own.
      compute: what to do meanwhile.
      *args: its arguments.

    Returns:
      The sums, and what `compute` returned.
    """
    count = max(len(reduction.stages) for reduction in reductions.values())
    pieces, result = cut(compute, count, *args)
    payloads: dict[str, Any] = dict(buckets)
    values: list[Any] = []
    for i, piece in enumerate(pieces):
        for name, reduction in reductions.items():
            if i < len(reduction.stages):
                payloads[name] = reduction.stages[i](payloads[name])
        values = piece(values)
        payloads, values = lax.optimization_barrier((payloads, values))
    sums = {name: reductions[name].finish(x) for name, x in payloads.items()}
    return sums, result(values)
