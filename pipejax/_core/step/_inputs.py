"""Defines the arrays that a step is given beside its state, as they lie on the mesh."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from pipejax._internal.mesh import AxisName
from pipejax._internal.types import Tree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class InputSpecs:
    """Partition specs of the inputs of a step, over inner axes.

    Both are empty on a mesh without inner axes, and for traced arrays, whose shardings
    are not known. It is a pytree without leaves.
    """

    batch: tuple[P, ...] = ()
    shared: tuple[P, ...] = ()


class Inputs(NamedTuple):
    """The inputs of a step that lie on the mesh.

    Attributes:
      batch: Arrays of which each device or group has its share.
      shared: Arrays and numbers of which each device or group has all, or `None`.
      specs: How each group splits the arrays.
    """

    batch: Tree
    shared: Tree = None
    specs: InputSpecs = InputSpecs()


def inputs_over(axis_name: AxisName) -> Inputs:
    """Returns how inputs are split over the axes of the data."""
    whole: Any = P()
    return Inputs(P(axis_name), P(), whole)
