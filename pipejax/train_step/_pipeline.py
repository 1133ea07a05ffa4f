"""The paper's recursion.

Worker i computes `g_i[t] = grad f_i(w[t])`; `g[t]` is the mean over workers.

- width 1: `w[t] = w[t-1] - u(g[t-1])`. D-Sync: all-reduce, then update.
- width 2: `w[t] = w[t-1] - u(g[t-2])`. Pipe-SGD: the all-reduce of the previous step's
  gradients needs nothing of this step, so it runs while this step computes.
- width K: `w[t] = w[t-1] - u(g[t-K])`. Constant staleness K-1, absorbs jitter.

This file is the delay: what goes in at step t comes out, summed, at step t + K - 1.

Reference: Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from pipejax.buckets import Buckets


class PipelinedMeanState(NamedTuple):
    """Gradients in flight: computed, not yet applied.

    Attributes:
      pending: this device's own newest gradient, not yet reduced, `{dtype: [1, n]}`;
        over a mesh of p devices `{dtype: [p, n]}`, row i that of device i. Empty at
        width 1.
      reduced: the sums over devices of the `width - 2` before it, oldest first, each
        `{dtype: [n]}`.
      filled: int32, how many gradients are in flight, at most `width - 1`.
    """

    pending: Buckets
    reduced: tuple[Buckets, ...]
    filled: jax.Array


def empty_pipeline(sizes: dict[str, int], width: int) -> PipelinedMeanState:
    """A pipeline of `width` with nothing in flight, for buckets of these sizes."""
    return PipelinedMeanState(
        pending={k: jnp.zeros((1, n), k) for k, n in sizes.items() if width > 1},
        reduced=tuple(
            {k: jnp.zeros(n, k) for k, n in sizes.items()} for _ in range(width - 2)
        ),
        filled=jnp.zeros((), jnp.int32),
    )


def width_of(state: PipelinedMeanState) -> int:
    """The width of the pipeline, as its form tells."""
    return len(state.reduced) + 2 if state.pending else 1


def advance(
    state: PipelinedMeanState, fresh: Buckets, axis_name: str
) -> tuple[Buckets, PipelinedMeanState]:
    """Takes in this step's buckets, gives out the sum that is due.

    Args:
      state: the pipeline.
      fresh: this device's own buckets of this step.
      axis_name: the axis to sum over.

    Returns:
      The sum over devices of the buckets of `width - 1` steps ago, zeros while there
      are none, and the pipeline one step on.
    """
    width = width_of(state)
    if width == 1:
        return lax.psum(fresh, axis_name), state
    sums = in_flight_sums(state, axis_name)
    (arriving, *waiting), fresh = _consumed_late(sums, fresh)
    state = PipelinedMeanState(
        pending={k: v[None] for k, v in fresh.items()},
        reduced=tuple(waiting),
        filled=jnp.minimum(state.filled + 1, width - 1),
    )
    return arriving, state


def _consumed_late(sums: Any, fresh: Any) -> tuple[Any, Any]:
    """Both as they are, the sums not to be used before `fresh` is there.

    Without the barrier XLA puts the update, and with it the end of the all-reduce,
    before this step's compute, where nothing hides it.
    """
    late = lax.optimization_barrier((sums, fresh))
    # In JAX 0.10 under `check_vma=True` the barrier makes the sums vary over the axis,
    # as `fresh` does, and no cast without a collective undoes it. No barrier, then:
    # the values are the same, the overlap is up to XLA. JAX 0.12 keeps them apart.
    if jax.tree.map(varying, late[0]) != jax.tree.map(varying, sums):
        return sums, fresh
    return late


def varying(x: Any) -> frozenset[str]:
    """The axes over which `x` is known to differ; none without `check_vma`."""
    return jax.typeof(x).manual_axis_type.varying


def in_flight_sums(state: PipelinedMeanState, axis_name: str) -> tuple[Buckets, ...]:
    """The `width - 1` sums in flight, oldest first; reduces the one that is pending.

    The newest `state.filled` of them are real, those before are zero.
    """
    pending = lax.psum({k: v[0] for k, v in state.pending.items()}, axis_name)
    return (*state.reduced, pending)


def in_flight_specs(axis_name: str) -> PipelinedMeanState:
    """One row of `pending` on each device; all else is the same on every device."""
    shared: Any = P()
    per_device: Any = P(axis_name)
    return PipelinedMeanState(per_device, shared, shared)
