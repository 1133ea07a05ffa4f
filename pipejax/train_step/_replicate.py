"""Places the same arrays on all devices of all processes."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def replicated(given: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Places arrays on every device of the mesh.

    On several processes this is a collective, so no other collective may be under way.
    While tracing, the arrays of the processes are not compared.

    Args:
      given: Pytrees of arrays, by the names of the arguments. They must be the same on
        every process.
      mesh: The devices.

    Returns:
      The same pytrees on the devices.

    Raises:
      ValueError: If processes give different structures or arrays. The error message
        names the first array that differs.
    """
    if mesh.is_multi_process and not _is_traced():
        _check_same(given)
    return jax.tree.map(lambda leaf: _placed(leaf, NamedSharding(mesh, P())), given)


def _placed(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Returns an array or a typed PRNG key in the given sharding."""
    if _is_key(leaf):
        # `jax.device_put` does not take keys to the devices of other processes.
        data = jax.device_put(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jax.device_put(leaf, sharding)


def _check_same(given: dict[str, Any]) -> None:
    """Raises a `ValueError` if a process has another structure or another array."""
    leaves = jax.tree_util.tree_leaves_with_path(given)
    names = [f"{path[0].key}{jax.tree_util.keystr(path[1:])}" for path, _ in leaves]
    if differing := _processes_that_differ(_digest(repr(jax.tree.structure(given)))):
        raise ValueError(
            "`train.init` must be given the same structure of arrays on every process;"
            f" got other structures on processes {differing} than on process 0. Here"
            f" are {names}."
        )
    digests = np.stack([_digest(*_content(leaf)) for _, leaf in leaves])
    if differing := _processes_that_differ(digests):
        found = multihost_utils.process_allgather(digests)
        first = int(np.flatnonzero((found != found[:1]).any(axis=(0, 2)))[0])
        raise ValueError(
            f"`{names[first]}` must be the same on every process, because every device"
            f" has a copy; got other values on processes {differing} than on process 0."
            " Make it from the same seed or the same file on every process."
        )


def _processes_that_differ(value: np.ndarray) -> list[int]:
    """Returns the processes whose `value` differs from that of process 0."""
    found = multihost_utils.process_allgather(value)
    different = (found != found[:1]).reshape(len(found), -1).any(axis=1)
    return np.flatnonzero(different).tolist()


def _content(leaf: Any) -> tuple[Any, ...]:
    """Returns the parts by which `_digest` tells arrays, or typed keys, apart."""
    if _is_key(leaf):
        return str(jax.random.key_impl(leaf)), *_content(jax.random.key_data(leaf))
    value = np.asarray(jax.device_get(leaf))
    return f"{value.dtype}{value.shape}", value.tobytes()


def _digest(*parts: str | bytes) -> np.ndarray:
    """Returns a digest of 16 bytes, which differs if any of the parts differs."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return np.frombuffer(digest.digest(), np.uint8)


def _is_traced() -> bool:
    """Returns whether this runs inside a transformation, such as `jax.eval_shape`."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _is_key(leaf: Any) -> bool:
    """Returns whether `leaf` is an array of typed PRNG keys."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )
