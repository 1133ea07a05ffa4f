"""Places the same arrays in all groups of devices, and checks that they are."""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._core.executors import StepConfig
from pipejax._internal.checksums import sums
from pipejax._internal.keys import is_key
from pipejax._internal.mesh import axes, inner_axes, is_traced
from pipejax._internal.shards import on_shards, split_axes
from pipejax._internal.structures import containers
from pipejax._internal.types import Leaf, Tree


def placed(
    arguments: dict[str, Any], specs: dict[str, Any], mesh: Mesh
) -> dict[str, Any]:
    """Places arrays on the mesh: in every group the same, split over inner axes.

    On several processes this is a collective, so no other collective may be under way.
    While tracing, the arrays of the processes are not compared.

    Raises a `ValueError`, which names the first array that differs between processes.
    """
    if mesh.is_multi_process and not is_traced():
        check_same(arguments, "train.init")
    return jax.tree.map(
        lambda leaf, spec: _placed(leaf, NamedSharding(mesh, spec)), arguments, specs
    )


def check_same(arguments: dict[str, Any], method: str) -> None:
    """Raises a `ValueError` if an array differs between processes, and names the first.

    This is a collective. `method` names the method that was given the arguments.
    """
    leaves = jax.tree_util.tree_leaves_with_path(arguments)
    names = [f"{path[0].key}{jax.tree_util.keystr(path[1:])}" for path, _ in leaves]
    if others := _processes_that_differ(_digest(containers(arguments), *names)):
        raise ValueError(
            f"`{method}` must be given the same structure of arrays on every process;"
            f" got other structures on processes {others} than on process 0. Here"
            f" are {names}."
        )
    if differing := first_differing([_content(leaf) for _, leaf in leaves]):
        first, processes = differing
        raise ValueError(
            f"`{names[first]}` must be the same on every process, because every device"
            f" has a copy; got other values on processes {processes} than on process 0."
            " Make it from the same seed or the same file on every process."
        )


def first_differing(
    contents: Sequence[tuple[str | bytes, ...]],
) -> tuple[int, list[int]] | None:
    """Returns the place of the first content that differs between processes, if any.

    Also returned are the processes of which any content differs from that of process 0.
    Every process must call this with equally many contents. It is a collective.
    """
    digests = np.stack([_digest(*content) for content in contents])
    if differing := _processes_that_differ(digests):
        found = multihost_utils.process_allgather(digests)
        first = int(np.flatnonzero((found != found[:1]).any(axis=(0, 2)))[0])
        return first, differing
    return None


def check_same_in_groups(placed: dict[str, Any], config: StepConfig) -> None:
    """Raises a `ValueError` if a sharded array differs between groups."""
    leaves = jax.tree_util.tree_leaves_with_path(placed)
    leaves = [x for x in leaves if isinstance(x[1], jax.Array)]
    leaves = [x for x in leaves if not x[1].sharding.is_fully_replicated]
    specs = [leaf.sharding.spec for _, leaf in leaves]
    between = [axes(config.axis_name)] * len(leaves)
    arrays = [leaf for _, leaf in leaves]
    place = _first_other_copy(arrays, specs, between, config, P())
    if place is not None:
        path = leaves[place][0]
        raise ValueError(
            f"`{path[0].key}{jax.tree_util.keystr(path[1:])}` must be the same in every"
            f" group, along {config.axis_name!r}; got other values in some. Make it"
            " from the same seed or the same file on every process."
        )


def check_same_inside(batch: Tree, specs: tuple[P, ...], config: StepConfig) -> None:
    """Raises a `ValueError` if devices of a group hold other copies of the same rows.

    `specs` says how groups split the arrays.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    arrays = [random.key_data(x) if is_key(x) else x for _, x in leaves]
    mesh, inner = config.mesh, inner_axes(config.mesh, config.axis_name)
    splits = [split_axes(spec, mesh.shape) for spec in specs]
    between = [tuple(name for name in inner if name not in split) for split in splits]
    place = _first_other_copy(arrays, specs, between, config, P(config.axis_name))
    if place is not None:
        raise ValueError(
            f"`batch{jax.tree_util.keystr(leaves[place][0])}` must have the same"
            " examples on all processes of a group of devices, because the group"
            " computes with them together; got other examples on some. Split them"
            " inside the group, too, with `train.batch(part, axis_name=...)` and all"
            " axes over which the group may split examples, or give all processes of a"
            " group the same part."
        )


def _first_other_copy(
    arrays: Sequence[jax.Array],
    specs: Sequence[P],
    between: Sequence[tuple[str, ...]],
    config: StepConfig,
    of_data: P,
) -> int | None:
    """Returns the place of the first array of which devices hold other bits, or `None`.

    `specs` says how a group splits each array over inner axes, and `of_data` how all
    are split over the axes of the data. Along the axes `between`, devices have copies.
    """
    if not arrays:
        return None

    def differs(shard: jax.Array, names: tuple[str, ...]) -> jax.Array:
        own = sums(shard)
        return (lax.pmin(own, names) != lax.pmax(own, names)).any()

    def differ(shards: list[jax.Array]) -> jax.Array:
        found = jnp.stack([*map(differs, shards, between)]).astype(jnp.int32)
        return lax.psum(found, config.mesh.axis_names) > 0

    def local(arrays: list[jax.Array]) -> jax.Array:
        return on_shards(differ, (list(specs),), P())(arrays)

    program = jax.jit(config.on_mesh(local, of_data, P()))
    found = jax.device_get(program([*arrays]))
    return int(np.flatnonzero(found)[0]) if found.any() else None


def _placed(leaf: Leaf, sharding: NamedSharding) -> jax.Array:
    """Returns an array or a typed PRNG key in the given sharding."""
    if is_key(leaf):
        # `jax.device_put` does not take keys to the devices of other processes.
        data = _placed(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    own = concrete and leaf.committed and leaf.is_fully_addressable
    if own and not sharding.is_fully_addressable:
        leaf = np.asarray(leaf)  # nor arrays that are placed on devices of this one
    return jax.device_put(leaf, sharding)


def _processes_that_differ(value: np.ndarray) -> list[int]:
    found = multihost_utils.process_allgather(value)
    different = (found != found[:1]).reshape(len(found), -1).any(axis=1)
    return np.flatnonzero(different).tolist()


def _content(leaf: Leaf) -> tuple[Any, ...]:
    """Returns the parts by which `_digest` tells arrays, or typed keys, apart."""
    if is_key(leaf):
        return str(jax.random.key_impl(leaf)), *_content(jax.random.key_data(leaf))
    if isinstance(leaf, jax.Array) and not leaf.sharding.is_fully_replicated:
        # A sharded array is one array of all processes. None of them may have all of
        # its shards, and processes with the same shards need not exist.
        return (f"{leaf.dtype}{leaf.shape}{leaf.sharding}",)
    value = np.asarray(jax.device_get(leaf))
    return f"{value.dtype}{value.shape}", value.tobytes()


def _digest(*parts: str | bytes) -> np.ndarray:
    """Returns a digest of 16 bytes, which differs if any of the parts differs."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return np.frombuffer(digest.digest(), np.uint8)
