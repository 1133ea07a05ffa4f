"""Defines a batch that lies on the mesh."""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["specs"]
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch that lies on the mesh, and how each group splits its share.

    Attributes:
      specs: A partition spec over inner axes for each array. Empty on a mesh without
        inner axes, and for traced arrays, whose shardings are not known.
    """

    arrays: Any
    specs: tuple[P, ...] = ()
