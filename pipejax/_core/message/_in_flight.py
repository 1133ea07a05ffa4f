r"""The delay of pipelined training: a queue of the last K-1 messages.

Let `w` be the parameters and `u` the update of the optimizer. In the paper, device i
computes the gradient `g_{i,t}` of its loss at `w_t`, and `g_t` is the mean over
devices.

- Width 1 is D-Sync, with an all-reduce followed by an update:

  $$w_t = w_{t-1} - u(g_{t-1})$$

- Width 2 is Pipe-SGD. The all-reduce of the previous step's gradients needs nothing of
  this step, so it runs while this step computes:

  $$w_t = w_{t-1} - u(g_{t-2})$$

- Width K has a delay of K-1 steps, which absorbs jitter:

  $$w_t = w_{t-1} - u(g_{t-K})$$

A message that enters the queue at step t leaves it at step t + K - 1. The queue does
not depend on which executor sums the message over devices, and when.

Reference:
  Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pipejax._internal.types import CodecStates

from ._compress_state import CompressState
from ._message import Message, with_constraints


class InFlight(NamedTuple):
    """Messages that are computed but not yet applied.

    On a mesh of p devices, the arrays of all devices are concatenated along the first
    axis of every leaf. The first axis is therefore p times as long as on one device.
    Devices of a host that average their gradients hold the same message, which then
    counts once.

    Sums over devices are not part of the state. Only the executor knows which
    reductions have started, and another executor starts them again.

    Attributes:
      pending: The last `width - 1` messages, oldest first.
      filled: int32 of shape [1], the number of valid messages, at most `width - 1`.
        They are the newest. All older messages are the zeros of an empty queue.
      codec_states: What the codecs of the all-reduce keep from one message to the next
        (residuals, keys, warm starts), as it was before the oldest message was sent.
        Empty if no codec has a state. The codecs of gradients that are not delayed have
        their own (`parted_states`).
    """

    pending: tuple[Message, ...]
    filled: jax.Array
    codec_states: CodecStates


PER_DEVICE = (InFlight, CompressState)
"""The parts of a state that differ between devices by design."""


def empty(like: Message, width: int, codec_states: CodecStates) -> InFlight:
    """Makes an empty queue for messages of a given form."""

    def zeros() -> Message:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

    return InFlight(
        pending=tuple(zeros() for _ in range(width - 1)),
        filled=jnp.zeros(1, jnp.int32),
        codec_states=codec_states,
    )


_AT_ONCE = "at once"  # the place of the states of gradients that are not delayed


def parted_states(states: CodecStates) -> tuple[CodecStates, CodecStates]:
    """Returns the codec states of delayed gradients, and those of all others."""
    late = {place: state for place, state in states.items() if place != _AT_ONCE}
    return late, states.get(_AT_ONCE, {})


def joined_states(late: CodecStates, at_once: CodecStates) -> CodecStates:
    """Undoes `parted_states`."""
    return {**late, _AT_ONCE: at_once} if at_once else late


def width_of(in_flight: InFlight) -> int:
    """Returns the width K of the pipeline, one more than the length of the queue."""
    return len(in_flight.pending) + 1


class Valid(NamedTuple):
    """Flags of the messages around an exchange: valid, or zeros of an empty queue.

    Attributes:
      message: bool scalar, whether the message that is exchanged is valid.
      behind: For each message that will be in flight after the update, oldest first,
        whether it is valid.
    """

    message: jax.Array
    behind: tuple[jax.Array, ...]


def valid_in_queue(in_flight: InFlight) -> tuple[jax.Array, ...]:
    """Returns for each message in the queue, oldest first, whether it is valid."""
    return _valid(in_flight.filled[0], len(in_flight.pending))


def valid_in_step(filled: Any, length: int, age: int = 0) -> Valid:
    """Returns which messages are valid when one is exchanged in a step.

    Each step puts a fresh message into the queue. At width 1, where the queue has no
    place, the message of the step itself is exchanged.

    `filled` is the number of valid messages now, and `length` that of places, K-1.
    `age` is the place of the message now: 0 is the oldest, and `length` that behind the
    newest.
    """
    # Until the message is due, `age` fresh ones enter the queue, and one with the step
    # that makes room for it. The comparison with itself is `True`, as XLA sees.
    due = filled >= (length - age if age < length else filled)
    return Valid(due, _valid(filled + age + 1, length))


def valid_at_once() -> Valid:
    """Returns that a message is valid which is exchanged in the step that makes it."""
    return valid_in_step(0, 0)


def entered(filled: jax.Array, length: int) -> jax.Array:
    """Returns the number of valid messages after a fresh one has entered the queue."""
    return jnp.minimum(filled + 1, length) if length else filled


def valid_in_drain(in_flight: InFlight, age: int) -> Valid:
    """Returns which messages are valid when one is exchanged in a drain."""
    now = valid_in_queue(in_flight)
    return Valid(now[age], now[age + 1 :])


def _valid(filled: Any, length: int) -> tuple[Any, ...]:
    """Returns for each place in a queue whether its message is valid."""
    return tuple(filled >= length - age for age in range(length))


def messages_of(in_flight: InFlight) -> int:
    """Returns the number of messages of a step, which are concatenated."""
    if not in_flight.pending:
        return in_flight.filled.shape[0]
    passengers = in_flight.pending[0].passengers
    return passengers.values.shape[0] // passengers.count


def count(in_flight: InFlight) -> int:
    """Returns the number of messages in flight; waits until they are computed."""
    return as_number(in_flight.filled)


def as_number(filled: Any) -> int:
    """Returns `InFlight.filled` as a number.

    Of a state that was read from bytes, it is an array of NumPy.
    """
    own = filled.addressable_data(0) if isinstance(filled, jax.Array) else filled
    return int(jax.device_get(own)[0])


def shift(in_flight: InFlight, fresh: Message, codec_states: CodecStates) -> InFlight:
    """Takes the oldest message off the queue and puts `fresh` at its end."""
    return InFlight(
        pending=(*in_flight.pending, fresh)[1:],
        filled=entered(in_flight.filled, len(in_flight.pending)),
        codec_states=codec_states,
    )


def at_width_1(in_flight: InFlight) -> InFlight:
    """Returns the pipeline for a synchronous step: only counter and codec states."""
    return in_flight._replace(pending=())


def emptied(in_flight: InFlight, codec_states: CodecStates) -> InFlight:
    """Returns the pipeline with nothing in flight, and with these codec states."""
    zeros = jax.tree.map(jnp.zeros_like, in_flight._replace(codec_states={}))
    pending = tuple(map(with_constraints, zeros.pending))
    return zeros._replace(pending=pending, codec_states=codec_states)
