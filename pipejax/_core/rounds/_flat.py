"""A pytree as chunks of equal size, which travel one by one.

A chunk is a slice of every array: of count chunks, chunk k has the k-th of count equal
parts of the elements of each. Zeros fill the last parts.

The devices of a group divide every chunk among themselves. A device has the shards that
it holds. Of shards that several devices hold, each of them has an equal part, so that
no element is sent twice.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from pipejax._internal.shards import group_axes, on_shards, shard_form, split_axes
from pipejax._internal.types import Tree

Chunk = dict[str, jax.Array]
"""A part of the elements of a pytree, as a vector for each dtype."""


def sliced(tree: Tree, number: ArrayLike, count: int, specs: Sequence[P] = ()) -> Chunk:
    """Returns one of `count` chunks of the elements of a pytree.

    `specs` say how a group shards each leaf. They are empty without inner axes.

    Examples:
      >>> tree = {"a": jnp.arange(3.0), "b": jnp.ones(2)}
      >>> [sliced(tree, k, 2)["float32"].tolist() for k in (0, 1)]
      [[0.0, 1.0, 1.0], [2.0, 0.0, 1.0]]
    """
    leaves = jax.tree.leaves(tree)
    parts = _parts(leaves, count, specs)

    def own(leaves: Sequence[jax.Array], number: jax.Array) -> Chunk:
        found: dict[str, list[jax.Array]] = {}
        for part in parts:
            place = number * part.devices
            if part.among:
                place += lax.axis_index(part.among)
            for leaf, length in zip(part.of(leaves), part.lengths, strict=True):
                # A row is found by its number: that of an element may exceed int32.
                rows = count * part.devices
                matrix = _padded(leaf, rows * length).reshape(rows, length)
                piece = lax.dynamic_index_in_dim(matrix, place, keepdims=False)
                found.setdefault(part.dtype, []).append(piece)
        return {name: jnp.concatenate(pieces) for name, pieces in found.items()}

    args = list(specs), P()
    return _on_shards(own, args, _split(specs), specs)(leaves, jnp.int32(number))


def is_padded(tree: Tree, count: int, specs: Sequence[P] = ()) -> bool:
    """Returns whether `count` chunks need padding, zeros at the end of an array.

    Examples:
      >>> [is_padded({"a": jnp.arange(3.0), "b": jnp.ones(3)}, n) for n in (1, 2, 3)]
      [False, True, False]
    """
    return any(
        length * count * part.devices != math.prod(form.shape)
        for part in _parts(jax.tree.leaves(tree), count, specs)
        for length, form in zip(part.lengths, part.forms, strict=True)
    )


def added(
    tree: Tree,
    chunk: Chunk,
    number: ArrayLike,
    count: int,
    specs: Sequence[P] = (),
) -> Any:
    """Returns a pytree with a chunk added to the elements that the chunk is of."""
    leaves, structure = jax.tree.flatten(tree)
    parts = _parts(leaves, count, specs)

    def own(
        leaves: Sequence[jax.Array], chunk: Chunk, number: jax.Array
    ) -> list[jax.Array]:
        found = {}
        for part, vector in zip(parts, _vectors(parts, chunk), strict=True):
            rows = _of_all(part, vector, axis=0)
            pieces = zip(
                part.places, part.of(leaves), _columns(part, rows), strict=True
            )
            for place, leaf, piece in pieces:
                found[place] = _with_piece(leaf, piece, number, count)
        return [found[place] for place in range(len(leaves))]

    args = list(specs), _split(specs), P()
    moved = _on_shards(own, args, list(specs), specs)
    return jax.tree.unflatten(structure, moved(leaves, chunk, jnp.int32(number)))


def whole(chunks: Sequence[Chunk], like: Tree, specs: Sequence[P] = ()) -> Any:
    """Returns the pytree, with the shapes of `like`, of which these are all chunks."""
    leaves, structure = jax.tree.flatten(like)
    parts = _parts(leaves, len(chunks), specs)

    def own(chunks: Sequence[Chunk]) -> list[jax.Array]:
        found = {}
        rows = zip(*(_vectors(parts, chunk) for chunk in chunks), strict=True)
        for part, vectors in zip(parts, rows, strict=True):
            every = _of_all(part, jnp.stack(vectors), axis=1)
            forms = zip(part.places, part.forms, _columns(part, every), strict=True)
            for place, form, vector in forms:
                found[place] = vector[: math.prod(form.shape)].reshape(form.shape)
        return [found[place] for place in range(len(leaves))]

    found = _on_shards(own, (_split(specs),), list(specs), specs)
    return jax.tree.unflatten(structure, found(chunks))


class _Part(NamedTuple):
    """Arrays of one dtype that the same devices of a group hold.

    Attributes:
      places: The places of the arrays among all leaves.
      forms: Shapes of the shards that a device holds of each.
      among: The inner axes along which devices hold the same shards.
      devices: The number of these devices.
      lengths: Number of elements that each device has of each array in a chunk.
    """

    dtype: str
    places: tuple[int, ...]
    forms: tuple[jax.ShapeDtypeStruct, ...]
    among: tuple[str, ...]
    devices: int
    lengths: tuple[int, ...]

    def of(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        return [leaves[place] for place in self.places]


def _parts(leaves: Sequence[Any], count: int, specs: Sequence[P]) -> tuple[_Part, ...]:
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
        devices = math.prod(sizes[name] for name in among)
        lengths = tuple(-(-math.prod(x.shape) // (count * devices)) for x in forms)
        return _Part(dtype, tuple(places), forms, among, devices, lengths)

    return tuple(part(*key, places) for key, places in found.items())


def _vectors(parts: Sequence[_Part], chunk: Chunk) -> list[jax.Array]:
    """Returns the elements of each part in a chunk."""
    rest, found = dict(chunk), []
    for part in parts:
        vector, rest[part.dtype] = jnp.split(rest[part.dtype], [sum(part.lengths)])
        found.append(vector)
    return found


def _of_all(part: _Part, x: jax.Array, axis: int) -> jax.Array:
    """Returns the pieces of all devices that hold the same shards, along an axis."""
    if not part.among:
        return jnp.expand_dims(x, axis)
    return lax.all_gather(x, part.among, axis=axis)


def _columns(part: _Part, rows: jax.Array) -> list[jax.Array]:
    """Returns the elements of each array of a part, which lie along the last axis."""
    ends = list(itertools.accumulate(part.lengths))[:-1]
    return [column.reshape(-1) for column in jnp.split(rows, ends, axis=-1)]


def _with_piece(
    leaf: jax.Array, piece: jax.Array, number: jax.Array, count: int
) -> jax.Array:
    """Returns an array with one of `count` pieces added to its elements.

    Only the elements of the piece are written, so that a donated array is moved in
    place. If all pieces together are longer than the array, the last ones are moved
    back until they end with it: padding would copy the array.
    """
    vector, length = leaf.reshape(-1), piece.size
    total = count * length
    # An element of a very long array cannot be found by its number, only by its row.
    if total == vector.size or total > _MOST or length > vector.size:
        matrix = _padded(leaf, total).reshape(count, length)
        moved = lax.dynamic_index_in_dim(matrix, number) + piece[None]
        matrix = lax.dynamic_update_index_in_dim(matrix, moved, number, 0)
        return matrix.reshape(-1)[: leaf.size].reshape(leaf.shape)
    start = jnp.minimum(number * length, vector.size - length)
    back = jnp.minimum(number * length - start, length)
    shifted = jnp.concatenate([jnp.zeros_like(piece), piece])
    shifted = lax.dynamic_slice(shifted, [length - back], [length])
    before = lax.dynamic_slice(vector, [start], [length])
    # The first elements belong to the piece before.
    own = lax.iota(back.dtype, length) >= back
    moved = jnp.where(own, before + shifted, before)
    return lax.dynamic_update_slice(vector, moved, [start]).reshape(leaf.shape)


_MOST = 2**31 - 1  # elements that an int32 counts


def _padded(leaf: jax.Array, length: int) -> jax.Array:
    vector = leaf.reshape(-1)
    return jnp.pad(vector, (0, length - vector.size))


def _split(specs: Sequence[P]) -> P:
    """Returns how the devices of a group divide a chunk."""
    return P(group_axes()[1]) if specs else P()


def _on_shards(own: Any, args: Any, result: Any, specs: Sequence[P]) -> Any:
    """Runs a function on the shards of each device of a group, if it has several."""
    return on_shards(own, args, result) if specs else own
