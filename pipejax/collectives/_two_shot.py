"""Two-shot: two collectives, whatever the number of devices.

Device i's vector is cut into p pieces:

1. encode each piece, all_to_all: device j has everybody's piece j
2. decode, sum in float32 (float64 for float64 vectors), encode, all_gather: everybody
   has every sum, decoded alike

Two rounding errors whatever p is; a ring that compresses at every hop has p.
"""

import dataclasses
from typing import Any

from jax import lax

from pipejax.codecs import Codec, check_codec
from pipejax.mesh import AxisName, axis_size

from ._scatter_gather import ScatterGather
from ._sites import Cut, Parts
from ._stages import Local, Sent, Stages, States
from ._wire import Transfer


@dataclasses.dataclass(frozen=True)
class TwoShot(ScatterGather):
    """See `two_shot`."""

    def reduce_scatter(self, cut: Cut, axis_name: AxisName) -> Stages:
        """all_to_all, then each device sums what is its own, in rank order."""
        p = axis_size(axis_name)
        site = cut.site("scatter", self.codec, axis_name, rows=p)

        def send(payload: Any) -> Any:
            return lax.all_to_all(payload, axis_name, 0, 0)

        def add(payload: Any, states: States) -> tuple[Parts, States]:
            return site.decoded_sum(payload), states

        transfer = Transfer("all-to-all", p, site.bytes)
        return Stages(
            (Local(site.encode, encodes=True), Sent(send, (transfer,)), Local(add)),
            (site.init,),
        )

    def all_gather(self, cut: Cut, axis_name: AxisName) -> Stages:
        """One `lax.all_gather`."""
        site = cut.site("gather", self.codec, axis_name)

        def send(payload: Any) -> Any:
            return lax.all_gather(payload, axis_name)

        def read(payload: Any, states: States) -> tuple[Parts, States]:
            return site.decode(payload), states

        transfer = Transfer("all-gather", axis_size(axis_name), site.bytes)
        return Stages(
            (Local(site.encode, encodes=True), Sent(send, (transfer,)), Local(read)),
            (site.init,),
        )


def two_shot(codec: Codec | None = None) -> TwoShot:
    """Every device sums one piece for all: all_to_all, then all_gather.

    With C the codec and x_i the vector of device i, every device has `C(sum_i C(x_i))`.
    Each sends `2 (p-1)/p` payloads of a whole vector, in two collectives.

    Args:
      codec: what travels; `None` sends all bits.

    Raises:
      ValueError: for what is no codec.
    """
    return TwoShot(check_codec(codec))
