"""Two-shot all-reduce: two collectives for any number of devices p."""

import dataclasses

import jax
from jax import lax

from pipejax._internal.mesh import AxisName, axis_size
from pipejax._internal.wire import Transfer
from pipejax.codecs import Codec, check_codec

from ._scatter_gather import ScatterGather
from ._sites import Cut
from ._stages import Sent, Stages, local


@dataclasses.dataclass(frozen=True)
class TwoShot(ScatterGather):
    def reduce_scatter(self, cut: Cut, axis_name: AxisName) -> Stages:
        """Returns an all-to-all, then the sum of each device's piece in rank order."""
        p = axis_size(axis_name)
        site = cut.site("scatter", self.codec, axis_name, rows=p)

        def send(payload: jax.Array) -> jax.Array:
            return lax.all_to_all(payload, axis_name, 0, 0)

        sent = Sent(send, (Transfer("all-to-all", p, site.bytes),))
        return site.encoding + Stages((sent,)) + local(site.decoded_sum)

    def all_gather(self, cut: Cut, axis_name: AxisName) -> Stages:
        site = cut.site("gather", self.codec, axis_name)

        def send(payload: jax.Array) -> jax.Array:
            return lax.all_gather(payload, axis_name)

        transfer = Transfer("all-gather", axis_size(axis_name), site.bytes)
        return site.encoding + Stages((Sent(send, (transfer,)),)) + local(site.decode)


def two_shot(codec: Codec | None = None) -> TwoShot:
    r"""Sums one piece on each device: an all-to-all, the sum, and an all-gather.

    1. Reduce-scatter: each device encodes p pieces of its vector. An all-to-all sends
       piece j of all devices to device j, which decodes them and sums in float32, or in
       float64 if any array is float64.
    2. All-gather: device j encodes piece j of the sum and sends it to all devices.

    With C the codec and `x_i` the vector of device i, every device ends with

    $$C(\sum_i C(x_i))$$

    Each device sends `2 (p-1)/p` payloads of a whole vector, as in `ring`. It is the
    algorithm of choice for a codec, since each value is encoded only twice.

    Args:
      codec: Encodes the payloads of both collectives; `None` encodes nothing.

    Returns:
      An `AllReduce` over any number of axes, which it treats as one.

    Examples:
      With `int8`, 4 devices send about a quarter of the bytes that they send without a
      codec, here for 1,024 elements of float32. The axis of `jax.vmap` stands for the
      devices.

      >>> import jax
      >>> from pipejax import codecs
      >>> from pipejax.collectives import Layout, two_shot
      >>> def show():
      ...     for codec in (None, codecs.int8()):
      ...         stages = two_shot(codec)(Layout.of_shapes(((1024,),)), "data")
      ...         print(sum(x.wire_bytes for x in stages.transfers))
      >>> jax.vmap(show, axis_name="data", axis_size=4)()
      6144.0
      1560.0

    References:
      Wang et al., ZeRO++, 2023, https://arxiv.org/abs/2306.10209
    """
    return TwoShot(check_codec(codec))
