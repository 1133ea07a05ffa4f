"""The exchange of one message, from the message of this device to what all have."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pipejax._internal.mesh import AxisName
from pipejax._internal.types import CodecStates
from pipejax.collectives import AllReduce, Stages, run

from ._agreed import agreement, in_means
from ._message import Message
from ._reduce import Reduced, layout_of, message_of, on_shards_of, summands


class Exchange(NamedTuple):
    """The exchange of one message: stages, and the values before and after them.

    An executor runs the stages back to back, or puts compute between them.

    Attributes:
      start: The value before the first stage.
      end: Function from the value after the last stage to the reduced message.
      early: The share of the compute that lies beside the first half of the stages, by
        bytes. More would keep the message in memory beside the gradients of the step
        that computes.
    """

    start: Any
    stages: Stages
    end: Callable[[Any], Reduced]
    early: float = 0.5

    def run(self, states: CodecStates) -> tuple[Reduced, CodecStates]:
        """Runs all stages back to back.

        Returns the reduced message, and the codec states after it.
        """
        value, after = run(self.stages, self.start, states)
        return self.end(value), after


def averaging(
    message: Message, valid: jax.Array, all_reduce: AllReduce, axis_name: AxisName
) -> Exchange:
    """Returns the exchange that gives every device the sum of all messages.

    A codec may compress the gradients. Changes and passengers travel exactly.
    """

    def end(total: Any) -> Reduced:
        return Reduced.of(message_of(total, message), valid)

    stages = on_shards_of(message, all_reduce)(layout_of(message), axis_name)
    agree = agreement(message, valid, axis_name)
    if message.weight is not None:
        stages = in_means(agree, stages, narrow=all_reduce.narrow)
    return Exchange(summands(message), stages.guarded(lambda: agree().usable), end)
