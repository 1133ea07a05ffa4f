"""What an all-reduce algorithm is."""

import abc
import dataclasses
import warnings
from typing import Any

from jax import lax
from jax.sharding import Mesh

from pipejax.codecs import Codec
from pipejax.codecs._all_bits import AllBits
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


def axis_size(axis_name: AxisName) -> int:
    """Devices along the axes; a ValueError where they are not bound."""
    try:
        return int(lax.axis_size(axis_name))
    except NameError:
        raise ValueError(
            "`axis_name` must be an axis of the surrounding shard_map or pmap, got"
            f" {axis_name!r}, which is not bound here. Call this inside jax.shard_map"
            f" over a mesh with the axis {axis_name!r}."
        ) from None


def check_axes(all_reduce: AllReduce, axis_name: AxisName) -> None:
    """A ValueError unless there are as many axes as the algorithm needs."""
    if all_reduce.axes not in (None, len(axes(axis_name))):
        raise ValueError(
            f"`axis_name` must name {all_reduce.axes} axes for this all-reduce, over"
            f" hosts and over the devices of one; got {axis_name!r}. Use"
            " pj.data_mesh(axis_name=('host', 'device')), and name both here."
        )


def check_codec(codec: Any) -> Codec:
    """The codec, `None` as one that loses nothing; a warning if it should not be alone.

    Raises:
      ValueError: for what is no codec.
    """
    if codec is None:
        return AllBits()
    if not isinstance(codec, Codec):
        raise ValueError(
            "`codec` must be a codec such as pj.codecs.int8(), or None to send all"
            f" bits; got {codec!r}."
        )
    if codec.needs_feedback:
        warnings.warn(
            f"{type(codec).__name__} is biased: what it loses adds up over the steps."
            " Wrap it, pj.codecs.error_feedback(codec), so that it is sent later.",
            stacklevel=3,
        )
    return codec
