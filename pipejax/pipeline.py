"""The paper's recursion.

Worker i computes `g_i[t] = grad f_i(w[t])`; `g[t]` is the mean over workers.

- width 1: `w[t] = w[t-1] - u(g[t-1])`. D-Sync: all-reduce, then update.
- width 2: `w[t] = w[t-1] - u(g[t-2])`. Pipe-SGD: the all-reduce of the previous step's
  gradients needs nothing of this step, so it runs while this step computes.
- width K: `w[t] = w[t-1] - u(g[t-K])`. Constant staleness K-1, absorbs jitter.

This file is the delay: a queue of K-1 gradients. What enters at step t leaves at step
t + K - 1; who sums it over the workers, and when, is the executor's business.

Reference: Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .buckets import Buckets


class PipelinedMeanState(NamedTuple):
    """Gradients in flight: computed, not yet applied. Each device has its own.

    Over a mesh of p devices every leaf is p times as long, the i-th part device i's.
    The sums over devices are not part of the state: whoever has begun to reduce a
    gradient knows, and whoever has not begins anew.

    Attributes:
      pending: the last `width - 1` gradients, oldest first, each `{dtype: [n]}`.
      filled: int32 [1], how many of them are real, at most `width - 1`: the newest.
      codec_states: what the codecs of the all-reduce keep from one gradient to the next
        (residuals, keys, warm starts), as it was before the oldest; empty without any.
      deviation: what the gradient before the oldest differed from its mean by, in
        buckets as those in flight; empty unless the weight prediction feeds it back.
    """

    pending: tuple[Buckets, ...]
    filled: jax.Array
    codec_states: Any
    deviation: Buckets


def empty_pipeline(
    sizes: dict[str, int], width: int, codec_states: Any, *, feeds_back: bool = False
) -> PipelinedMeanState:
    """A pipeline of `width` with nothing in flight, for buckets of these sizes."""

    def zeros() -> Buckets:
        return {k: jnp.zeros(n, k) for k, n in sizes.items()}

    return PipelinedMeanState(
        pending=tuple(zeros() for _ in range(width - 1)),
        filled=jnp.zeros(1, jnp.int32),
        codec_states=codec_states,
        deviation=zeros() if feeds_back else {},
    )


def width_of(state: PipelinedMeanState) -> int:
    """The width of the pipeline, as its form tells."""
    return len(state.pending) + 1


def lengths_of(state: PipelinedMeanState) -> dict[str, int]:
    """Elements of each bucket in flight; none at width 1."""
    return {k: v.size for k, v in state.pending[0].items()} if state.pending else {}


def arrivals(state: PipelinedMeanState) -> list[jax.Array]:
    """For each in the queue, whether it is a gradient, not only zeros of the start."""
    count = len(state.pending)
    return [state.filled[0] >= count - age for age in range(count)]


def has_arrived(state: PipelinedMeanState) -> jax.Array:
    """Whether what this step applies is a gradient; at width 1 it always is."""
    return state.filled[0] == len(state.pending)


def count_in_flight(state: PipelinedMeanState) -> int:
    """How many gradients are in flight, read by the host, which waits for them."""
    filled = state.filled
    own = filled.addressable_data(0) if isinstance(filled, jax.Array) else filled
    return int(own[0])


def shift(
    state: PipelinedMeanState, fresh: Buckets, codec_states: Any, deviation: Buckets
) -> PipelinedMeanState:
    """One step on: the oldest is gone, this device's `fresh` buckets are the newest."""
    return PipelinedMeanState(
        pending=(*state.pending, fresh)[1:],
        filled=jnp.minimum(state.filled + 1, len(state.pending)),
        codec_states=codec_states,
        deviation=deviation,
    )


def at_width_1(state: PipelinedMeanState) -> PipelinedMeanState:
    """What a synchronous step is given in its place: no queue, the codecs' states."""
    return state._replace(pending=(), deviation={})


def emptied(state: PipelinedMeanState, codec_states: Any) -> PipelinedMeanState:
    """The same pipeline with nothing in flight."""
    zeros = jax.tree.map(jnp.zeros_like, state._replace(codec_states={}))
    return zeros._replace(codec_states=codec_states)
