"""The interface of an all-reduce algorithm."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

from pipejax._internal.mesh import AxisName, axes
from pipejax.codecs import Codec

from ._layout import Layout
from ._stages import Stages, States


@dataclasses.dataclass(frozen=True)
class AllReduce(abc.ABC):
    """An all-reduce algorithm, which sums the arrays of all devices.

    Calling an algorithm with a `Layout` returns the `Stages` that sum arrays of this
    layout. Most users pass it to `make_train_step(all_reduce=...)` instead. A subclass
    is a frozen dataclass that implements `__call__`; the page
    docs/reference/collectives.md has an example.
    """

    @property
    def axes(self) -> int | None:
        """Returns the number of mesh axes that the algorithm needs.

        `None` stands for any number. The algorithm then treats all axes as one.
        """
        return None

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Returns the codecs of the algorithm, and those that they wrap."""
        return tuple(_codecs_in(self))

    @property
    def narrow(self) -> bool:
        """Returns whether a codec has the range of float16, as `Codec.narrow` says."""
        return any(codec.narrow for codec in self.codecs)

    @abc.abstractmethod
    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        """Returns the stages that sum arrays of this layout over devices.

        Must be called inside `jax.shard_map`, because the stages depend on the number
        of devices.

        Args:
          layout: Shapes and dtypes of the arrays on one device, the same on all.
          axis_name: Axis or axes of the surrounding `shard_map` to sum over.

        Returns:
          The stages. After them, all devices have the same sums, bit for bit.

        Raises:
          ValueError: If `axis_name` is not an axis of a surrounding `shard_map`.
        """

    def init(self, layout: Layout, axis_name: AxisName) -> States:
        """Returns the states of the codecs on this device before the first sum.

        Must be called inside `jax.shard_map`, as `__call__`. Codecs without a state are
        not in the dict.

        Args:
          layout: Shapes and dtypes of the arrays on one device.
          axis_name: Axis or axes of the surrounding `shard_map` to sum over.
        """
        return self(layout, axis_name).init()

    def on(self, mesh: Mesh) -> "AllReduce":
        """Returns the variant of this algorithm that suits `mesh` best."""
        del mesh
        return self

    def unmerged(self) -> "AllReduce":
        """Returns a variant whose collectives XLA does not merge with those of this.

        A step may have two exchanges. Merged, the earlier would wait for the later.
        """
        return self

    def check_axes(self, axis_name: AxisName) -> None:
        """Checks that `axis_name` names as many axes as the algorithm needs.

        Args:
          axis_name: Axis or axes to sum over.

        Raises:
          ValueError: If the number of axes is wrong.
        """
        if self.axes not in (None, len(axes(axis_name))):
            raise ValueError(
                f"`axis_name` must name {self.axes} axes for this all-reduce, one for"
                " the hosts and one for the devices of each host; got"
                f" {axis_name!r}. Create the mesh with"
                " pj.data_mesh(axis_name=('host', 'device')), and pass both names here."
            )


def _codecs_in(value: Any) -> Iterator[Codec]:
    if isinstance(value, Codec):
        yield value
    if isinstance(value, Codec | AllReduce) and dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _codecs_in(getattr(value, field.name))
