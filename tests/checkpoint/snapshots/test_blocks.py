"""Tests that the blocks of arrays are those that shardings describe."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax.checkpoint._snapshots import _blocks
from pipejax.checkpoint._snapshots._blocks import Block

MESH = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])


def arrays():
    """Returns arrays that are split along both axes, along one, and not at all."""
    specs = {"both": P("a", "b"), "one": P("b"), "none": P()}
    x = jnp.arange(24, dtype=jnp.bfloat16).reshape(4, 6)
    return {k: jax.device_put(x, NamedSharding(MESH, v)) for k, v in specs.items()}


def test_each_block_is_held_once():
    held = _blocks.held(arrays())
    counts = {name: [x.name for x in held].count(name) for name in arrays()}
    assert counts == {"both": 4, "one": 2, "none": 1}
    found = held[Block("both", (2, 3), (2, 3), "bfloat16")]
    assert np.array_equal(found, np.asarray(arrays()["both"])[2:, 3:])


def test_size_is_the_sum_over_blocks():
    assert sum(each.size for each in _blocks.held(arrays())) == 3 * 24 * 2


def test_blocks_of_shapes_equal_the_blocks_of_arrays():
    shapes = {
        k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding)
        for k, v in arrays().items()
    }
    assert _blocks.wanted(shapes) == {*_blocks.held(arrays())}


def test_arrays_are_assembled_from_their_blocks():
    shapes = {
        k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding)
        for k, v in arrays().items()
    }
    contents = {k: np.asarray(v) for k, v in _blocks.held(arrays()).items()}
    for name, array in _blocks.assembled(shapes, contents).items():
        assert array.sharding == shapes[name].sharding
        assert np.array_equal(array, arrays()[name])
