"""A pytree as chunks of equal size, which travel one by one.

The devices of a group divide every chunk among themselves. A device has the shards that
it holds. Of shards that several devices hold, each of them has an equal part, so that
no element is sent twice.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from pipejax._internal.ravel import ravel, unravel
from pipejax._internal.shards import group_axes, on_shards, shard_form, split_axes
from pipejax._internal.types import Tree

Chunk = dict[str, jax.Array]
"""A part of the elements of a pytree, as a vector for each dtype."""


def chunked(tree: Tree, count: int, specs: Sequence[P] = ()) -> tuple[Chunk, ...]:
    """Returns the elements of a pytree in chunks. Zeros fill the last one.

    `specs` say how a group shards each leaf. They are empty without inner axes.

    Examples:
      >>> first, last = chunked({"a": jnp.arange(3.0), "b": jnp.ones(2)}, 2)
      >>> first["float32"].tolist(), last["float32"].tolist()
      ([0.0, 1.0, 2.0], [1.0, 1.0, 0.0])
    """
    leaves = jax.tree.leaves(tree)
    parts = _parts(leaves, specs)

    def own(leaves: Sequence[jax.Array]) -> tuple[Chunk, ...]:
        found: dict[str, list[jax.Array]] = {}
        for part in parts:
            vector = ravel([leaves[place] for place in part.places])
            found.setdefault(part.dtype, []).append(_cut(vector, part))
        rows = {name: _rows(ravel(vectors), count) for name, vectors in found.items()}
        return tuple({name: x[i] for name, x in rows.items()} for i in range(count))

    if not specs:
        return own(leaves)
    return on_shards(own, (list(specs),), P(group_axes()[1]))(leaves)


def whole(chunks: Sequence[Chunk], like: Tree, specs: Sequence[P] = ()) -> Any:
    """Undoes `chunked`: returns a pytree with the shapes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    parts = _parts(leaves, specs)

    def own(chunks: Sequence[Chunk]) -> list[jax.Array]:
        vectors = {name: ravel([chunk[name] for chunk in chunks]) for name in chunks[0]}
        found: dict[int, jax.Array] = {}
        for part in parts:
            vector, rest = jnp.split(vectors[part.dtype], [part.length])
            vectors[part.dtype] = rest
            if part.among:
                vector = lax.all_gather(vector, part.among, tiled=True)
            found |= zip(part.places, unravel(vector, part.forms), strict=True)
        return [found[place] for place in range(len(leaves))]

    if specs:
        own = on_shards(own, (P(group_axes()[1]),), list(specs))
    return jax.tree.unflatten(structure, own(chunks))


class _Part(NamedTuple):
    """Arrays of one dtype that the same devices of a group hold.

    Attributes:
      places: The places of the arrays among all leaves.
      forms: Shapes of the shards that a device holds of each.
      among: The inner axes along which devices hold the same shards.
      length: Number of elements that each device has of them.
    """

    dtype: str
    places: tuple[int, ...]
    forms: tuple[jax.ShapeDtypeStruct, ...]
    among: tuple[str, ...]
    length: int


def _parts(leaves: Sequence[Any], specs: Sequence[P]) -> tuple[_Part, ...]:
    mesh, inner = group_axes() if specs else (None, ())
    sizes = {name: mesh.shape[name] for name in inner} if mesh else {}
    found: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for place, leaf in enumerate(leaves):
        split = split_axes(specs[place], sizes) if specs else ()
        among = tuple(n for n in inner if sizes[n] > 1 and n not in split)
        found.setdefault((str(leaf.dtype), among), []).append(place)

    def part(dtype: str, among: tuple[str, ...], places: Sequence[int]) -> _Part:
        forms = tuple(
            shard_form(leaves[i], specs[i] if specs else P(), sizes) for i in places
        )
        total = sum(math.prod(form.shape) for form in forms)
        length = -(-total // math.prod(sizes[name] for name in among))
        return _Part(dtype, tuple(places), forms, among, length)

    return tuple(part(*key, places) for key, places in found.items())


def _cut(vector: jax.Array, part: _Part) -> jax.Array:
    """Returns this device's part of elements that several devices hold."""
    if not part.among:
        return vector
    devices = lax.axis_size(part.among)
    vector = jnp.pad(vector, (0, part.length * devices - vector.size))
    start = lax.axis_index(part.among) * part.length
    return lax.dynamic_slice(vector, (start,), (part.length,))


def _rows(vector: jax.Array, count: int) -> jax.Array:
    missing = -vector.size % count
    return jnp.pad(vector, (0, missing)).reshape(count, -1)
