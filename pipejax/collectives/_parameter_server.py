"""Parameter server: all send to device 0, which sums and sends to all.

The paper's baseline. The server has one link: of the `2(p-1)` messages that cross it,
each waits for the one before, here as there.
"""

import dataclasses
from typing import Any

from pipejax.codecs import Codec, check_codec
from pipejax.mesh import AxisName, axis_size

from ._all_reduce import AllReduce
from ._layout import Layout, Summands
from ._permute import hand_over, permute
from ._sites import Cut, Parts, Site
from ._stages import Local, Stages, States, local
from ._tree import first, from_root


@dataclasses.dataclass(frozen=True)
class ParameterServer(AllReduce):
    """See `parameter_server`."""

    codec: Codec

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        """p-1 messages to the server, p-1 from it."""
        p = axis_size(axis_name)
        codec = self.codec.of(layout.shapes)
        cut = Cut.of(layout, 1, codec.multiple)
        worker = cut.site("worker", codec, axis_name)
        server = cut.site("server", codec, axis_name)

        def encode(summands: Summands, states: States) -> tuple[Any, States]:
            payload, states = worker.encode(first(cut.rows(summands)), states)
            return [payload], states

        def add(payloads: Any) -> Parts:
            return worker.decoded_sum(payloads)

        total = Stages((Local(encode, encodes=True),), (worker.init, server.init))
        for rank in range(1, p):
            total += _to_server(worker, axis_name, rank)
        total += local(add) + from_root(server, axis_name)
        for rank in range(1, p):
            total += hand_over(axis_name, [(0, rank)], server.bytes)
        return total + local(lambda payload: cut.arrays(server.decode(payload[None])))


def _to_server(site: Site, axis_name: AxisName, rank: int) -> Stages:
    """One more payload at the end; the first is the device's own."""
    sent = permute(axis_name, [(rank, 0)], site.bytes)
    return (
        local(lambda payloads: (payloads, payloads[0]))
        + Stages((sent,))
        + local(lambda value: [*value[0], value[1]])
    )


def parameter_server(codec: Codec | None = None) -> ParameterServer:
    """Device 0 is given every vector, in turn, sums, and gives every device the sum.

    With C the codec, every device has `C(sum_i C(x_i))`. The server, which is a worker
    too, receives and sends `p-1` whole payloads: its link is the limit.

    Args:
      codec: what travels, to the server and from it; `None` sends all bits.

    Raises:
      ValueError: for what is no codec.
    """
    return ParameterServer(check_codec(codec))
