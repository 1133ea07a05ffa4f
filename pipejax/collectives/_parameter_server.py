"""Parameter server: all devices send to device 0, which sums and sends the sum back.

This is the baseline of the Pipe-SGD paper. As in the paper, all `2 (p-1)` payloads
cross the single link of the server, one after another.

Reference: Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
"""

import dataclasses
from typing import Any

from pipejax._internal.mesh import AxisName, axis_size
from pipejax.codecs import Codec, check_codec

from ._all_reduce import AllReduce
from ._layout import Layout, Summands
from ._permute import hand_over, permute
from ._sites import Cut, Parts, Site
from ._stages import Local, Stages, States, local
from ._tree import first, from_root


@dataclasses.dataclass(frozen=True)
class ParameterServer(AllReduce):
    """Parameter server on device 0; see `parameter_server`."""

    codec: Codec

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
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
    """Returns the stage in which the device `rank` sends its payload to the server."""
    # The value is a list of payloads that begins with the device's own. Each stage
    # appends what the device has received.
    sent = permute(axis_name, [(rank, 0)], site.bytes)
    return (
        local(lambda payloads: (payloads, payloads[0]))
        + Stages((sent,))
        + local(lambda value: [*value[0], value[1]])
    )


def parameter_server(codec: Codec | None = None) -> ParameterServer:
    r"""Sends all vectors to device 0, which sums them and sends the sum to all devices.

    With C the codec and `x_i` the vector of device i, every device ends with

    $$C(\sum_i C(x_i))$$

    as with `two_shot`. Here, however, one device sums the whole vector. Device 0
    contributes a vector of its own, and its link carries `2 (p-1)` payloads of a whole
    vector on p devices, which limits the speed. Use it as the baseline of the paper.

    Args:
      codec: Encodes the payloads to the server and from it. `None` sends all bits of
        float32 or float64 vectors.

    Returns:
      An `AllReduce` over any number of axes, which it treats as one.

    Raises:
      ValueError: If `codec` is neither a codec nor `None`.

    Warns:
      UserWarning: If `codec` is biased and has no error feedback.

    Examples:
      The number of collectives and the bytes that they send among 8 devices for 1,000
      elements of float32. The axis of `jax.vmap` stands for the devices.

      >>> import jax
      >>> from pipejax.collectives import Layout, parameter_server
      >>> def count():
      ...     layout = Layout.of_shapes(((1000,),))
      ...     transfers = parameter_server()(layout, "data").transfers
      ...     print(len(transfers), sum(x.wire_bytes for x in transfers))
      >>> jax.vmap(count, axis_name="data", axis_size=8)()
      14 56000

    References:
      Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI
      2014,
      https://research.google/pubs/scaling-distributed-machine-learning-with-the-parameter-server

      Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
    """
    return ParameterServer(check_codec(codec))
