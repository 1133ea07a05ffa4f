"""A check that the replicas on all devices are bit-identical."""

import hashlib
from typing import Any

import jax
import numpy as np

from pipejax._core.message import PER_DEVICE
from pipejax._internal.types import Tree


def replica_digest(tree: Tree) -> dict[int, str]:
    """Returns one digest per device of all arrays in `tree` that have copies.

    All devices apply the same mean gradient in the same step. After any number of
    steps, their replicas are therefore equal bit for bit, and so are the digests.

    If groups of devices shard a model, every device has the digest of its shards.
    Devices at the same place in their groups then have equal digests, so that there are
    as many different digests as a group has devices.

    Leaves that differ between devices by design are left out: gradients in flight,
    codec states, and arrays of which each device holds another part. Leaves that are
    not a `jax.Array` are left out too. The check copies every replica to the host, so
    do not run it in every step.

    Args:
      tree: Pytree of arrays, such as a `PipelineState` or its parameters.

    Returns:
      A dict from the id of each device of this process to a digest of 32 hexadecimal
      digits. Digests of different processes can be compared with each other.

    Raises:
      ValueError: If no leaf of `tree` is a `jax.Array` of which devices hold copies, so
        that nothing would be checked.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import pipejax as pj
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> everywhere = NamedSharding(pj.data_mesh(), PartitionSpec())
      >>> params = jax.device_put({"w": jnp.ones(3)}, everywhere)
      >>> digests = pj.replica_digest(params)
      >>> len(set(digests.values()))
      1
    """
    replicated = [
        _raw(leaf)
        for leaf in jax.tree.leaves(tree, is_leaf=_is_own)
        if isinstance(leaf, jax.Array) and _has_copies(leaf)
    ]
    if not replicated:
        raise ValueError(
            "`tree` must hold at least one replicated jax.Array; got none, so nothing"
            " would be checked. Pass the state or its parameters."
        )
    hashes: dict[int, Any] = {}
    for leaf in replicated:
        for shard in leaf.addressable_shards:
            digest = hashes.setdefault(shard.device.id, hashlib.blake2b(digest_size=16))
            value = np.asarray(shard.data)
            digest.update(f"{value.dtype}{value.shape}{shard.index}".encode())
            digest.update(value.tobytes())
    return {device: digest.hexdigest() for device, digest in hashes.items()}


def _has_copies(leaf: jax.Array) -> bool:
    """Returns whether several devices hold the same part of an array, or only one."""
    if leaf.is_fully_replicated:
        return True
    parts = leaf.sharding.devices_indices_map(leaf.shape).values()
    return len(set(map(str, parts))) < len(parts)


def _is_own(node: Any) -> bool:
    """Returns whether `node` holds arrays that differ between devices by design."""
    return isinstance(node, PER_DEVICE)


def _raw(leaf: jax.Array) -> jax.Array:
    """Returns the array, or the integers that make up an array of typed PRNG keys."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf
