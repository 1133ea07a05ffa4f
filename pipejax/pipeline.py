"""The paper's recursion.

Worker i computes `g_i[t] = grad f_i(w[t])`; `g[t]` is the mean over workers.

- width 1: `w[t] = w[t-1] - u(g[t-1])`. D-Sync: all-reduce, then update.
- width 2: `w[t] = w[t-1] - u(g[t-2])`. Pipe-SGD: the all-reduce of the previous step's
  gradients needs nothing of this step, so it runs while this step computes.
- width K: `w[t] = w[t-1] - u(g[t-K])`. Constant staleness K-1, absorbs jitter.

This file is the delay: a queue of K-1 gradients. What enters at step t leaves at step
t + K - 1; who sums it over the workers in between, and when, is the executor's business.

Reference: Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .buckets import Buckets


class PipelinedMeanState(NamedTuple):
    """Gradients in flight: computed, not yet applied.

    Attributes:
      pending: this device's own last `width - 1` gradients, oldest first, each
        `{dtype: [1, n]}`; over a mesh of p devices `{dtype: [p, n]}`, row i that of
        device i. Their sums over devices are not part of the state: whoever has begun
        to reduce one knows, and whoever has not begins anew.
      filled: int32, how many of them are real, at most `width - 1`: the newest.
    """

    pending: tuple[Buckets, ...]
    filled: jax.Array


def empty_pipeline(sizes: dict[str, int], width: int) -> PipelinedMeanState:
    """A pipeline of `width` with nothing in flight, for buckets of these sizes."""
    return PipelinedMeanState(
        pending=tuple(
            {k: jnp.zeros((1, n), k) for k, n in sizes.items()}
            for _ in range(width - 1)
        ),
        filled=jnp.zeros((), jnp.int32),
    )


def width_of(state: PipelinedMeanState) -> int:
    """The width of the pipeline, as its form tells."""
    return len(state.pending) + 1


def lengths_of(state: PipelinedMeanState) -> dict[str, int]:
    """Elements of each bucket in flight; none at width 1."""
    buckets = state.pending[0] if state.pending else {}
    return {k: v.shape[-1] for k, v in buckets.items()}


def own(state: PipelinedMeanState, age: int = 0) -> Buckets:
    """This device's own gradient at that place in the queue; 0 is the next due."""
    return {k: v[0] for k, v in state.pending[age].items()}


def arrivals(state: PipelinedMeanState) -> list[jax.Array]:
    """For each in the queue, whether it is a gradient, not only zeros of the start."""
    count = len(state.pending)
    return [state.filled >= count - age for age in range(count)]


def has_arrived(state: PipelinedMeanState) -> jax.Array:
    """Whether what this step applies is a gradient; at width 1 it always is."""
    return state.filled == len(state.pending)


def shift(state: PipelinedMeanState, fresh: Buckets) -> PipelinedMeanState:
    """One step on: the oldest is gone, this device's `fresh` buckets are the newest."""
    newest = {k: v[None] for k, v in fresh.items()}
    return PipelinedMeanState(
        pending=(*state.pending, newest)[1:],
        filled=jnp.minimum(state.filled + 1, len(state.pending)),
    )


def emptied(state: PipelinedMeanState) -> PipelinedMeanState:
    """The same pipeline with nothing in flight."""
    return jax.tree.map(jnp.zeros_like, state)


def in_flight_specs(axis_name: str) -> PipelinedMeanState:
    """One row of each pending bucket on each device; all else is the same on all."""
    shared: Any = P()
    per_device: Any = P(axis_name)
    return PipelinedMeanState(per_device, shared)
