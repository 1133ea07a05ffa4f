"""All-reduce algorithms in two halves: a reduce-scatter, then an all-gather.

1. After the reduce-scatter, device i has piece i of the sum and is its owner.
2. After the all-gather, every device has all pieces.

The owner of a piece also decodes the payload that it sends, instead of using the sum
that it encoded. All devices thus end with the same bits.
"""

import abc
import dataclasses

from pipejax._internal.mesh import AxisName, axis_size
from pipejax.codecs import Codec

from ._all_reduce import AllReduce
from ._layout import Layout
from ._sites import Cut
from ._stages import Stages, local


@dataclasses.dataclass(frozen=True)
class ScatterGather(AllReduce):
    """An algorithm that consists of a reduce-scatter and an all-gather."""

    codec: Codec

    def pieces(self, devices: int) -> int:
        """Returns the number of pieces into which the vector is cut.

        Device i owns piece i. If there are fewer pieces than devices, the last own
        none.
        """
        return devices

    @abc.abstractmethod
    def reduce_scatter(self, cut: Cut, axis_name: AxisName) -> Stages:
        """Returns the stages that sum all pieces and leave each device with its own.

        They turn `Parts` [pieces, h] into `Parts` [h].
        """

    @abc.abstractmethod
    def all_gather(self, cut: Cut, axis_name: AxisName) -> Stages:
        """Returns the stages that give every device all pieces of the sum.

        They turn `Parts` [h] into `Parts` [pieces, h].
        """

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        pieces = self.pieces(axis_size(axis_name))
        cut = Cut.of(layout, pieces, self.codec.multiple)
        return (
            local(cut.rows)
            + self.reduce_scatter(cut, axis_name)
            + self.all_gather(cut, axis_name)
            + local(cut.arrays)
        )
