"""Tests that a pytree in chunks is the same pytree again."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.rounds._flat import chunked, whole
from pipejax._internal.mesh import on_mesh

TREE = {
    "a": np.arange(5, dtype=np.float32),
    "b": np.arange(6, dtype=np.float16).reshape(2, 3),
    "c": np.float32(7),
}


@pytest.mark.parametrize("chunks", [1, 2, 4, 9])
def test_chunks_of_equal_size_hold_every_element(chunks):
    found = chunked(TREE, chunks)
    assert len(found) == chunks
    for name in ("float32", "float16"):
        assert len({chunk[name].shape for chunk in found}) == 1
    chex.assert_trees_all_equal(whole(found, TREE), TREE)


def test_elements_lie_in_the_order_of_the_leaves():
    first, last = chunked(TREE, 2)
    assert first["float32"].tolist() == [0, 1, 2]
    assert last["float16"].tolist() == [3, 4, 5]
    found = whole((first, jax.tree.map(jnp.negative, last)), TREE)
    assert found["b"].tolist() == [[0, 1, 2], [-3, -4, -5]]
    assert found["a"].tolist() == [0, 1, 2, -3, -4]
    assert found["c"] == -7


def test_devices_with_the_same_shards_divide_their_elements():
    """Two devices hold halves of `a`, and both hold `b`."""
    mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
    tree = {"a": np.arange(4.0, dtype=np.float32), "b": np.arange(5, 8.0, dtype="f4")}
    specs = P("fsdp"), P()

    def cut(tree):
        return chunked(tree, 2, specs)

    def again(chunks):
        return whole(chunks, tree, specs)

    first, last = jax.jit(on_mesh(cut, mesh, P(), P(), "host"))(tree)
    # Each device has 2 elements of `a` and 2 of `b`, of which the last is padding.
    assert first["float32"].tolist() == [0, 1, 2, 3]
    assert last["float32"].tolist() == [5, 6, 7, 0]
    found = jax.jit(on_mesh(again, mesh, P(), P(), "host"))((first, last))
    chex.assert_trees_all_equal(jax.device_get(found), tree)
