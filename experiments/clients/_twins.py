"""The three twins: loops that are written by hand, on one device, without pipejax.

Let `w` be the parameters, `u` the update of the optimizer, and `g` the mean gradient
over devices.

- Width 1: `w[t] = w[t-1] - u(g[t-1])`
- Width 2, plain: `w[t] = w[t-1] - u(g[t-2])`, with a queue of one mean gradient
- Width 2, predicted: the same update, but device i takes its gradient at
  `w - u(g_i)`, where `g_i` is its own gradient in the queue. This `u` works on a copy
  of the optimizer's state.

At width 2, no update is applied until the first gradient has arrived. At the end, the
gradient that is left in the queue is applied. Model states obey the same recursions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ._pieces import DEVICES, Inputs, Message, Pieces, State, part, stacked


class History(NamedTuple):
    """The values by which two runs are compared.

    Attributes:
      params: The parameters after every step and after the drain.
      reported: The loss and the metrics of every batch.
      model_state: The model state at the end.
    """

    params: list[Any]
    reported: list[Any]
    model_state: Any


def width_1(pieces: Pieces, state: State, steps: Sequence[Inputs]) -> History:
    """Trains synchronously, at width 1."""
    params, reported = [], []
    for inputs in steps:
        message = pieces.whole(state, inputs)
        state = pieces.update(state, message)
        params.append(state.params)
        reported.append(message.reported)
    return History(params, reported, state.model_state)


def width_2_plain(pieces: Pieces, state: State, steps: Sequence[Inputs]) -> History:
    """Applies every mean gradient one step late, without weight prediction."""
    params, reported = [], []
    queue: list[Message] = []
    for inputs in steps:
        queue.append(pieces.whole(state, inputs))
        if len(queue) == 2:
            message = queue.pop(0)
            state = pieces.update(state, message)
            reported.append(message.reported)
        params.append(state.params)
    (last,) = queue
    state = pieces.update(state, last)
    return History(
        [*params, state.params], [*reported, last.reported], state.model_state
    )


def width_2_predicted(pieces: Pieces, state: State, steps: Sequence[Inputs]) -> History:
    """Applies every mean gradient one step late, with weight prediction.

    Each device takes its gradient at the parameters to which its own gradient in the
    queue would lead.
    """
    params, reported = [], []
    queue: list[Message] = []
    for inputs in steps:
        ahead = [state] * DEVICES
        if queue:
            ahead = [pieces.update(state, part(queue[0], i)) for i in range(DEVICES)]
        queue.append(pieces.own(stacked(ahead), inputs))
        if len(queue) == 2:
            message = pieces.mean(queue.pop(0))
            state = pieces.update(state, message)
            reported.append(message.reported)
        params.append(state.params)
    last = pieces.mean(queue[0])
    state = pieces.update(state, last)
    return History(
        [*params, state.params], [*reported, last.reported], state.model_state
    )
