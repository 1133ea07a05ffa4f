"""Makes global batches, of which each process gives its own part."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from ._check_input import common_length, named_shapes
from ._check_settings import check_count


def global_batch(local: Any, data: NamedSharding, devices: int) -> Any:
    """Makes the global batch of which this process has the part `local`.

    Args:
      local: Pytree of arrays, whose leading axis is this process's part of the batch.
      data: Sharding of the global batch over the mesh.
      devices: Number of devices of all processes that share the batch.

    Raises:
      ValueError: If the arrays have no common leading axis, or if its length is not a
        positive multiple of the number of shares of this process.
    """
    indices = data.addressable_devices_indices_map((devices,)).values()
    shares = len({index[0].start for index in indices if index is not None})
    length = common_length(local)
    if not length or length % shares:
        raise ValueError(
            "`local` must hold arrays with one common leading axis, the examples of"
            f" this process, a positive multiple of its {shares} shares of a batch; got"
            f" shapes {named_shapes('local', local)}. Drop the remainder."
        )
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(data, np.asarray(x)), local
    )


def least_of_all_processes(own: int) -> int:
    """Returns the least number that any process gives, by means of a collective."""
    own = check_count("own", own, 0)
    return int(multihost_utils.process_allgather(np.int32(own)).min())


def check_global(batch: Any, mesh: Mesh) -> None:
    """Raises a `ValueError` if an array of `batch` belongs to this process alone.

    On a mesh of one process such an array is the global batch. On a mesh of several
    processes it is ambiguous: it may be the global batch or this process's part.
    """
    if not mesh.is_multi_process:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        is_global = isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct) or (
            isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        )
        if not is_global:
            raise ValueError(
                "`batch` must be a global array on a mesh of several processes, got"
                f" `batch{jax.tree_util.keystr(path)}`, a {type(leaf).__name__} of this"
                " process alone. Give each process its own part of the batch:"
                " `train.step(state, train.batch(part))`."
            )
