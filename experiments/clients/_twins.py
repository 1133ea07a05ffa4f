"""The three twins: loops that are written by hand, on one device, without pipejax.

Let `w` be the parameters, `u` the update of the optimizer, and `g` the mean gradient
over devices.

- Width 1: `w[t] = w[t-1] - u(g[t-1])`
- Width 2, plain: `w[t] = w[t-1] - u(g[t-2])`, with a queue of one mean gradient
- Width 2, predicted: the same update, but device i takes its gradient at
  `w - u(g_i)`, where `g_i` is its own gradient in the queue. This `u` works on a copy
  of the optimizer's state.

At width 2, no update is applied until the first gradient has arrived. At the end, the
gradient that is left in the queue is applied. Changes of the model state are applied
together with the gradients. In both twins of width 2, a device computes at the model
state to which its own change in the queue leads.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from ._pieces import DEVICES, Inputs, Message, Pieces, State, moved, part, stacked


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


class Computed(NamedTuple):
    """The messages of a step, which wait in the queue.

    Attributes:
      mean: The mean over the devices.
      own: The messages of all devices, or `None` if one device took the whole batch.
    """

    mean: Message
    own: Any


Compute = Callable[[Pieces, State, Sequence[Computed], Inputs], Computed]


def at_params(
    pieces: Pieces, state: State, queue: Sequence[Computed], inputs: Inputs
) -> Computed:
    """Takes the mean gradient at the parameters."""
    if pieces.whole:
        if queue:
            state = moved(state, queue[0].mean.change)
        return Computed(pieces.whole(state, inputs), None)
    states = [state] * DEVICES
    if queue:
        change = queue[0].own.change
        states = [moved(state, part(change, i)) for i in range(DEVICES)]
    return _of_all(pieces, states, inputs)


def at_predictions(
    pieces: Pieces, state: State, queue: Sequence[Computed], inputs: Inputs
) -> Computed:
    """Takes each device's gradient where its own gradient in the queue would lead."""
    states = [state] * DEVICES
    if queue:
        own = queue[0].own
        states = [pieces.update(state, part(own, i)) for i in range(DEVICES)]
    return _of_all(pieces, states, inputs)


def _of_all(pieces: Pieces, states: Sequence[State], inputs: Inputs) -> Computed:
    messages = pieces.own(stacked(states), inputs)
    return Computed(pieces.mean(messages), messages)


class Twin:
    """A training loop by hand, which applies a gradient `width - 1` steps late."""

    def __init__(
        self, pieces: Pieces, state: State, rng: Any, *, width: int, compute: Compute
    ):
        self._pieces, self._state, self._rng = pieces, state, rng
        self._width, self._compute = width, compute
        self._queue: list[Computed] = []
        self._params: list[Any] = []
        self._reported: list[Any] = []

    @property
    def params(self) -> Any:
        """Returns the parameters after the last step."""
        return self._state.params

    def step(self, batch: Any, shared: Any = None) -> None:
        """Computes a gradient, and applies the one that is due."""
        inputs = Inputs(batch, shared, self._key())
        now = self._compute(self._pieces, self._state, self._queue, inputs)
        self._queue.append(now)
        if len(self._queue) == self._width:
            self._apply()
        self._params.append(self.params)

    def finish(self) -> History:
        """Applies every gradient in the queue."""
        while self._queue:
            self._apply()
            self._params.append(self.params)
        return History(self._params, self._reported, self._state.model_state)

    def _apply(self) -> None:
        message = self._queue.pop(0).mean
        self._state = self._pieces.update(self._state, message)
        self._reported.append(message.reported)

    def _key(self) -> Any:
        """Returns the key of the step, which is split from the client's."""
        if self._rng is None:
            return None
        self._rng, key = jax.random.split(self._rng)
        return key
