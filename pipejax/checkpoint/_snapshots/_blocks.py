"""The blocks of a state's arrays that the devices of one process hold."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Index = tuple[slice, ...]


class Block(NamedTuple):
    """A rectangular block of an array.

    Attributes:
      name: The name of the array, as in a checkpoint.
      start: The index of the first element of the block, along each axis.
      shape: The shape of the block.
      dtype: The name of the dtype.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Returns the number of bytes."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def block(name: str, array: Any, index: Index) -> Block:
    """Returns the block of `array` that lies at `index`, as shardings describe it."""
    pairs = list(zip(index, array.shape, strict=True))
    start = tuple(part.start or 0 for part, _ in pairs)
    ends = (length if part.stop is None else part.stop for part, length in pairs)
    shape = tuple(end - begin for begin, end in zip(start, ends, strict=True))
    return Block(name, start, shape, array.dtype.name)


def held(arrays: dict[str, jax.Array]) -> dict[Block, jax.Array]:
    """Returns each block that this process holds, once, on one of its devices."""
    found: dict[Block, jax.Array] = {}
    for name, array in arrays.items():
        for shard in array.addressable_shards:
            found.setdefault(block(name, array, shard.index), shard.data)
    return found


def wanted(shapes: dict[str, jax.ShapeDtypeStruct]) -> set[Block]:
    """Returns the blocks that this process needs for arrays of these shardings."""
    return {
        block(name, shape, index)
        for name, shape in shapes.items()
        for index in _own(shape).values()
    }


def assembled(
    shapes: dict[str, jax.ShapeDtypeStruct], contents: dict[Block, np.ndarray]
) -> dict[str, jax.Array]:
    """Returns arrays of these shapes and shardings, made of blocks."""
    return {
        name: jax.make_array_from_single_device_arrays(
            shape.shape,
            shape.sharding,
            [
                jax.device_put(contents[block(name, shape, index)], device)
                for device, index in _own(shape).items()
            ],
        )
        for name, shape in shapes.items()
    }


def _own(shape: jax.ShapeDtypeStruct) -> dict[Any, Index]:
    sharding: Any = shape.sharding
    return dict(sharding.addressable_devices_indices_map(shape.shape))
