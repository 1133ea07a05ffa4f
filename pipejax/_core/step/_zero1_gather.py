"""Gathers the parameters that devices compute with, if the optimizer is sharded.

The owner of a piece sends its new values x. With a codec C, it sends by how much they
differ from the values y that all devices have gathered, and every device adds what it
decodes: `y + C(x - y)`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from pipejax._internal.ravel import promoted
from pipejax._internal.shards import data_spec
from pipejax._internal.types import Leaf
from pipejax.collectives import AllReduce, ReduceScatterAllGather, on_own_shards, run

from ._loss import is_floating
from ._partition import Partition, split_of
from ._state import Trainable
from ._step import Settings


def gathered_dtype(settings: Settings, leaf: Leaf) -> DTypeLike:
    """Returns the dtype in which a parameter is gathered."""
    if settings.compute_dtype is None or not is_floating(leaf):
        return leaf.dtype
    return jnp.dtype(settings.compute_dtype)


def sent_dtype(settings: Settings, leaf: Leaf) -> DTypeLike:
    """Returns the dtype in which a parameter, or its difference, is sent."""
    dtype = gathered_dtype(settings, leaf)
    if settings.gather_codec is None:
        return dtype
    return promoted(dtype, jnp.float32)


def forms(
    settings: Settings,
    params: optax.Params,
    partition: Partition,
    dtype_of: Callable[[Settings, Leaf], DTypeLike],
) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the pieces that a device sends."""
    pairs = zip(jax.tree.leaves(params), partition.params, strict=True)
    return [
        partition.piece(leaf, spec).update(dtype=dtype_of(settings, leaf))
        for leaf, spec in pairs
    ]


def gather(
    settings: Settings, trainable: Trainable, all_reduce: AllReduce
) -> Trainable:
    """Gathers the parameters as they are, whatever has been gathered before."""
    shards, whole = trainable.shards, trainable.whole_params
    partition = Partition.of(settings, trainable)
    stages = ReduceScatterAllGather(all_reduce, shards.data_axes).all_gather(
        forms(settings, whole, partition, gathered_dtype), settings.axis_name
    )
    if shards:
        stages = on_own_shards(stages, partition.params_inner, partition.params_inner)
    leaves, structure = jax.tree.flatten(trainable.params)
    sent = tuple(x.astype(gathered_dtype(settings, x)) for x in leaves)
    gathered, _ = run(stages, sent, {})
    return trainable._replace(gathered=jax.tree.unflatten(structure, gathered))


def own_pieces(
    settings: Settings, trainable: Trainable, partition: Partition
) -> optax.Params:
    """Returns this device's pieces of the parameters that all have gathered."""
    leaves, structure = jax.tree.flatten(trainable.gathered)
    cuts = zip(leaves, trainable.shards.data_axes, strict=True)
    pieces = [
        partition.devices.piece(
            leaf, split_of(data_spec(cut, settings.axis_name), leaf.ndim)
        )
        for leaf, cut in cuts
    ]
    return jax.tree.unflatten(structure, pieces)


def difference(new: jax.Array, gathered: jax.Array) -> jax.Array:
    """Returns what the owner of a piece sends with a codec.

    Both are in the dtype of gathered arrays: what this dtype cannot hold would stay in
    every difference, and hide smaller ones from the codec.
    """
    wide = promoted(gathered.dtype, jnp.float32)
    by = new.astype(wide) - _finite_or_zero(gathered).astype(wide)
    return jnp.where(new == gathered, 0, by)  # also where both are infinite


def moved(gathered: jax.Array, by: jax.Array) -> jax.Array:
    """Returns a gathered array after a difference that was decoded."""
    wide = promoted(gathered.dtype, by.dtype)
    after = _finite_or_zero(gathered).astype(wide) + by.astype(wide)
    stays = jnp.isinf(gathered) & (by == 0)
    return jnp.where(stays, gathered, after.astype(gathered.dtype))


def _finite_or_zero(x: jax.Array) -> jax.Array:
    """Returns an array with zeros in place of values that no difference can mend."""
    return jnp.where(jnp.isfinite(x), x, 0)
