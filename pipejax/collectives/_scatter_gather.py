"""All-reduces in two halves: reduce-scatter, then all-gather.

1. after the first, device i has the i-th piece of the sum
2. after the second, every device has all pieces

What the owner of a piece sends is what it uses itself, decoded, so that all devices end
with the same bits.
"""

import abc
import dataclasses

from pipejax.codecs import Codec
from pipejax.mesh import AxisName, axis_size

from ._all_reduce import AllReduce
from ._layout import Layout
from ._sites import Cut
from ._stages import Stages, local


@dataclasses.dataclass(frozen=True)
class ScatterGather(AllReduce):
    """An algorithm in two halves, which others may put something between."""

    codec: Codec

    def pieces(self, devices: int) -> int:
        """How many, and so many devices, the first of them, own one."""
        return devices

    @abc.abstractmethod
    def reduce_scatter(self, cut: Cut, axis_name: AxisName) -> Stages:
        """From a device's own pieces, [pieces, h], to its piece of the sum, [h]."""

    @abc.abstractmethod
    def all_gather(self, cut: Cut, axis_name: AxisName) -> Stages:
        """From a device's piece, [h], to all of them, [pieces, h]."""

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        """One half after the other."""
        pieces = self.pieces(axis_size(axis_name))
        cut = Cut.of(layout, pieces, self.codec.multiple)
        return (
            local(cut.rows)
            + self.reduce_scatter(cut, axis_name)
            + self.all_gather(cut, axis_name)
            + local(cut.arrays)
        )
