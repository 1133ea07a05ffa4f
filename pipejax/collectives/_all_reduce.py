"""What an all-reduce algorithm is."""

import abc
import dataclasses

from jax.sharding import Mesh

from pipejax.mesh import AxisName, axes

from ._layout import Layout
from ._stages import Stages, States


@dataclasses.dataclass(frozen=True)
class AllReduce(abc.ABC):
    """An algorithm: from what is to be summed to the stages that do it.

    Called inside `shard_map`.
    """

    @property
    def axes(self) -> int | None:
        """How many mesh axes it must be given; `None` takes one or more as one."""
        return None

    @abc.abstractmethod
    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        """Returns the stages that sum arrays of this layout.

        Args:
          layout: of each device's own arrays.
          axis_name: the axes of the surrounding `shard_map` to sum over.
        """

    def init(self, layout: Layout, axis_name: AxisName) -> States:
        """What its codecs keep, before the first sum; empty without any."""
        return self(layout, axis_name).init()

    def on(self, mesh: Mesh) -> "AllReduce":
        """Returns the algorithm as it is best on this mesh; by default as it is."""
        del mesh
        return self

    def check_axes(self, axis_name: AxisName) -> None:
        """Raises a ValueError unless there are as many axes as the algorithm needs."""
        if self.axes not in (None, len(axes(axis_name))):
            raise ValueError(
                f"`axis_name` must name {self.axes} axes for this all-reduce, over"
                f" hosts and over the devices of one; got {axis_name!r}. Use"
                " pj.data_mesh(axis_name=('host', 'device')), and name both here."
            )
