"""The delay: a queue of K-1 messages, and the paper's recursion.

Device i computes `g_i[t] = grad f_i(w[t])`; `g[t]` is the mean over devices.

- width 1: `w[t] = w[t-1] - u(g[t-1])`. D-Sync: all-reduce, then update.
- width 2: `w[t] = w[t-1] - u(g[t-2])`. Pipe-SGD: the all-reduce of the previous step's
  gradients needs nothing of this step, so it runs while this step computes.
- width K: `w[t] = w[t-1] - u(g[t-K])`. The delay is K-1 steps, and absorbs jitter.

A message that enters the queue at step t leaves it at step t + K - 1. Which executor
sums it over devices, and when, does not matter here.

Reference: Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._message import Message


class InFlight(NamedTuple):
    """Messages that are computed and not yet applied. Each device has its own.

    Over a mesh of p devices the first axis of every leaf is p times as long as on one
    device, and the i-th part is device i's. Sums over devices are not part of the
    state: an executor that has begun to reduce a message knows it, and any other begins
    anew.

    Attributes:
      pending: the last `width - 1` messages, oldest first.
      filled: int32 [1], how many of them are real: the newest, at most `width - 1`.
      codec_states: what the codecs of the all-reduce keep from one message to the next
        (residuals, keys, warm starts), as it was before the oldest; empty without any.
      deviation: gradients of the message before the oldest, minus their mean over
        devices; `None` unless weight prediction feeds it back.
    """

    pending: tuple[Message, ...]
    filled: jax.Array
    codec_states: Any
    deviation: Any


def empty(
    like: Message, width: int, codec_states: Any, *, feeds_back: bool = False
) -> InFlight:
    """Makes a queue with nothing in it, for messages of this form.

    Args:
      like: a message, or its shapes.
      width: pipeline width K, at least 1.
      codec_states: what the codecs keep before the first message.
      feeds_back: whether the deviation is kept.
    """

    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

    return InFlight(
        pending=tuple(zeros(like) for _ in range(width - 1)),
        filled=jnp.zeros(1, jnp.int32),
        codec_states=codec_states,
        deviation=zeros(like.gradients) if feeds_back else None,
    )


def width_of(in_flight: InFlight) -> int:
    """Returns the width K of the pipeline."""
    return len(in_flight.pending) + 1


def arrivals(in_flight: InFlight) -> list[jax.Array]:
    """Returns for each place in the queue whether it holds a real message."""
    count = len(in_flight.pending)
    return [in_flight.filled[0] >= count - age for age in range(count)]


def has_arrived(in_flight: InFlight) -> jax.Array:
    """Returns whether the message that leaves at this step is real.

    At width 1 it always is.
    """
    return in_flight.filled[0] == len(in_flight.pending)


def count(in_flight: InFlight) -> int:
    """Returns how many messages are in flight; waits for them to be computed."""
    filled = in_flight.filled
    own = filled.addressable_data(0) if isinstance(filled, jax.Array) else filled
    return int(jax.device_get(own)[0])


def shift(
    in_flight: InFlight, fresh: Message, codec_states: Any, deviation: Any
) -> InFlight:
    """Takes the oldest message off the queue and puts `fresh` at its end."""
    return InFlight(
        pending=(*in_flight.pending, fresh)[1:],
        filled=jnp.minimum(in_flight.filled + 1, len(in_flight.pending)),
        codec_states=codec_states,
        deviation=deviation,
    )


def at_width_1(in_flight: InFlight) -> InFlight:
    """Returns what a synchronous step is given: no queue, the codecs' states."""
    return in_flight._replace(pending=(), deviation=None)


def emptied(in_flight: InFlight, codec_states: Any) -> InFlight:
    """Returns the same pipeline with nothing in flight."""
    zeros = jax.tree.map(jnp.zeros_like, in_flight._replace(codec_states={}))
    return zeros._replace(codec_states=codec_states)
