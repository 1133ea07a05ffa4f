"""The three loops, written by hand on one device, without pipejax.

`w` are the parameters, `u` the optimizer's update, `g` the mean gradient over devices:

- width 1: `w[t] = w[t-1] - u(g[t-1])`
- width 2, plain: `w[t] = w[t-1] - u(g[t-2])`, from a queue of one mean gradient
- width 2, predicted: likewise, but device i takes its gradient at `w - u(g_i)`, where
  `g_i` is its own gradient in the queue; with a copy of the optimizer's state

Nothing is applied until the first gradient has arrived, and in the end that in the
queue is. Model states obey the same recursions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ._pieces import DEVICES, Inputs, Message, Pieces, State, part, stacked


class History(NamedTuple):
    """What a run is compared by.

    Attributes:
      params: after every step, and after what was in flight at the end.
      reported: loss and metrics of every batch.
      model_state: in the end.
    """

    params: list[Any]
    reported: list[Any]
    model_state: Any


def width_1(pieces: Pieces, state: State, steps: Sequence[Inputs]) -> History:
    """Trains synchronously."""
    params, reported = [], []
    for inputs in steps:
        message = pieces.whole(state, inputs)
        state = pieces.update(state, message)
        params.append(state.params)
        reported.append(message.reported)
    return History(params, reported, state.model_state)


def width_2_plain(pieces: Pieces, state: State, steps: Sequence[Inputs]) -> History:
    """Applies every mean gradient one step late."""
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
    """Likewise, each device's gradient where its own one in the queue would lead."""
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
