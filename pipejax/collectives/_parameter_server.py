"""Parameter server: all devices send to device 0, which sums and sends the sum back."""

import dataclasses

from pipejax._internal.mesh import AxisName, axis_size
from pipejax.codecs import Codec, check_codec

from ._all_reduce import AllReduce
from ._layout import Layout
from ._permute import append_received, hand_over
from ._sites import Cut
from ._stages import Stages, local
from ._tree import first, from_root


@dataclasses.dataclass(frozen=True)
class ParameterServer(AllReduce):
    codec: Codec

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        p = axis_size(axis_name)
        codec = self.codec.of(layout.shapes)
        cut = Cut.of(layout, 1, codec.multiple)
        worker = cut.site("worker", codec, axis_name)
        server = cut.site("server", codec, axis_name)

        total = local(lambda summands: first(cut.rows(summands))) + worker.encoding
        # The list begins with the payload of the device itself. The server receives
        # those of all others.
        total += local(lambda payload: [payload])
        for rank in range(1, p):
            total += append_received(axis_name, [(rank, 0)], worker.bytes, 0)
        total += local(worker.decoded_sum) + from_root(server, axis_name)
        for rank in range(1, p):
            total += hand_over(axis_name, [(0, rank)], server.bytes)
        return total + local(lambda payload: cut.arrays(server.decode(payload[None])))


def parameter_server(codec: Codec | None = None) -> ParameterServer:
    r"""Sends all vectors to device 0, which sums them and sends the sum to all devices.

    With C the codec and `x_i` the vector of device i, every device ends with

    $$C(\sum_i C(x_i))$$

    as with `two_shot`. Use it as the baseline of the paper: device 0 contributes a
    vector of its own, and its link carries `2 (p-1)` payloads of a whole vector on p
    devices, one after another.

    Args:
      codec: Encodes the payloads to the server and from it; `None` encodes nothing.

    Returns:
      An `AllReduce` over any number of axes, which it treats as one.

    References:
      Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI
      2014,
      https://research.google/pubs/scaling-distributed-machine-learning-with-the-parameter-server

      Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
    """
    return ParameterServer(check_codec(codec))
