"""A check that replicas are what they claim to be: bit-identical."""

import hashlib
from typing import Any

import jax
import numpy as np

from .message import InFlight


def replica_digest(tree: Any) -> dict[int, str]:
    """One digest per device of everything that `tree` claims to replicate.

    All replicas apply the same mean of the same iteration, so after any number of
    steps the digests of all devices are equal, bit for bit. Gradients in flight and
    what codecs keep, which differ between devices by design, leaves that are sharded,
    and leaves that are not `jax.Array` are left out. Copies every replica to the host:
    a check, not for every step.

    Args:
      tree: pytree of arrays: a `PipelineState`, or parameters alone.

    Returns:
      `{device id: hexadecimal digest}` for the devices of this process. Processes
      compare theirs with each other's as they like.

    Raises:
      ValueError: if nothing in `tree` is replicated, so that nothing was checked.

    >>> import jax.numpy as jnp
    >>> len(set(replica_digest({"w": jnp.ones(3)}).values()))
    1
    """
    replicated = [
        _raw(leaf)
        for leaf in jax.tree.leaves(tree, is_leaf=_is_own)
        if isinstance(leaf, jax.Array) and leaf.is_fully_replicated
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
            digest.update(f"{value.dtype}{value.shape}".encode())
            digest.update(value.tobytes())
    return {device: digest.hexdigest() for device, digest in hashes.items()}


def _is_own(node: Any) -> bool:
    """What each device has for itself, wherever it lies."""
    return isinstance(node, InFlight)


def _raw(leaf: jax.Array) -> jax.Array:
    """Typed PRNG keys as the integers they are."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf
