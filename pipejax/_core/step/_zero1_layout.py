"""Plans how the arrays of a sharded optimizer are split, before there is a state."""

import dataclasses

import jax
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Message
from pipejax._core.partitioned import NotElementwiseError
from pipejax._internal.mesh import axes
from pipejax._internal.shards import Shards, data_axes_of
from pipejax._internal.structures import of_leaves

from ._partition import Partition, spec_leaves
from ._prediction import KindOf
from ._state import Trainable
from ._step import Settings
from ._zero1_update import after_update, program_of


def layout(
    settings: Settings,
    kind_of: KindOf,
    params: optax.Params,
    shards: Shards,
    message: Message,
    mesh: Mesh | AbstractMesh,
) -> Shards:
    """Returns how all arrays of a state are split.

    An array of the optimizer state is split as the values that an update writes into
    it, which follows from the splits of gradients, parameters and state. Each array
    that is found to be split may split others, so the update is planned until nothing
    changes.

    Raises a `ValueError` if devices cannot update their pieces by themselves.
    """
    # Ends, because an array is only ever split further, and has few axes.
    while True:
        whole = Trainable(params, None, shards=shards)
        partition = Partition.of(settings, whole, mesh.shape)
        args = settings, kind_of, whole, message, 0, partition
        try:
            after = after_update(program_of(*args), partition)
        except NotElementwiseError as error:
            raise ValueError(
                "`tx` must update each element from the gradient, the parameter and"
                " the state at its place, and from sums or maxima over axes of an"
                " array, because with shard_optimizer=True every device has only a"
                f" piece of each array; got an operation `{error}`. Where groups"
                " shard a model, sums are over whole arrays alone. Choose an optimizer"
                " such as optax.adamw, or leave out shard_optimizer."
            ) from error
        shards = dataclasses.replace(shards, opt_state=after)
        if after == tuple(spec_leaves(partition.opt_state)):
            return shards


def layout_alone(
    settings: Settings,
    kind_of: KindOf,
    params: optax.Params,
    shards: Shards,
    message: Message,
    mesh: Mesh,
) -> Shards:
    """Returns `shards`, which divide nothing, after planning as for two devices."""
    sizes = {**mesh.shape, axes(settings.axis_name)[0]: 2}
    specs = shards.params or (P(),) * len(jax.tree.leaves(params))
    data_axes = data_axes_of(params, specs, 2, sizes)
    cut = dataclasses.replace(shards, data_axes=data_axes)
    # A message has no gradients of frozen parameters.
    of_message = of_leaves(data_axes, params, message.gradients)
    sent = dataclasses.replace(message.shards, data_axes=of_message)
    two = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    layout(settings, kind_of, params, cut, message._replace(shards=sent), two)
    return shards
