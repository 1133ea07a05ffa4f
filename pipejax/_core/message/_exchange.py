"""The exchange of one message, from the message of this device to what all have."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pipejax._internal.mesh import AxisName
from pipejax._internal.types import CodecStates, Tree
from pipejax.collectives import AllReduce, Stages, guarded, run

from ._message import Message
from ._reduce import (
    Reduced,
    layout_of,
    message_of,
    on_shards_of,
    summands,
    usable_by_all,
)


class Exchange(NamedTuple):
    """The exchange of one message: stages, and the values before and after them.

    An executor runs the stages back to back, or puts compute between them.

    Attributes:
      start: The value before the first stage.
      end: Function from the value after the last stage to the reduced message.
      early: The share of the compute that lies beside the first half of the stages, by
        bytes. More would keep the message in memory beside the gradients of the step
        that computes.
      usable: Function that says whether the sum will be usable. It is called before the
        first stage, and has a collective of two numbers.
      guards: Whether the stages themselves keep states where nothing is applied.
    """

    start: Any
    stages: Stages
    end: Callable[[Any], Reduced]
    usable: Callable[[], jax.Array]
    early: float = 0.5
    guards: bool = False

    def guarded(self, states: CodecStates) -> "Exchange":
        """Returns the exchange whose stages replace codec states where they are made.

        It takes no memory for a second residual, but for a collective of two numbers
        before the first stage.
        """
        if self.guards or not jax.tree.leaves(states):
            return self
        stages = guarded(self.stages, self.usable())
        return self._replace(stages=stages, guards=True)

    def run(self, states: CodecStates) -> tuple[Reduced, Any]:
        """Runs all stages back to back.

        Returns the reduced message, and the codec states after it, which are unchanged
        if the reduced message is not usable.
        """
        return self.finish(*run(self.stages, self.start, states), states)

    def finish(
        self, value: Tree, after: CodecStates, before: CodecStates
    ) -> tuple[Reduced, CodecStates]:
        """Returns the result of `run`, given the value after the last stage.

        Where nothing is applied, codecs keep their states, as if nothing had been sent.
        """
        reduced = self.end(value)
        if self.guards:
            return reduced, after
        usable = reduced.usable
        states = jax.tree.map(lambda a, b: jnp.where(usable, a, b), after, before)
        return reduced, states


def averaging(
    message: Message, valid: jax.Array, all_reduce: AllReduce, axis_name: AxisName
) -> Exchange:
    """Returns the exchange that gives every device the sum of all messages.

    A codec may compress the gradients. Changes and passengers travel exactly.
    """

    def end(total: Any) -> Reduced:
        return Reduced.of(message_of(total, message), valid)

    stages = on_shards_of(message, all_reduce)(layout_of(message), axis_name)
    usable = functools.partial(usable_by_all, message, valid, axis_name)
    return Exchange(summands(message), stages, end, usable)
