"""Tests that a pytree in chunks is the same pytree again."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.rounds import _flat
from pipejax._core.rounds._flat import added, sliced, whole
from pipejax._internal.mesh import on_mesh

from ...helpers import assert_bits_equal

TREE = {
    "a": np.arange(5, dtype=np.float32),
    "b": np.arange(6, dtype=np.float16).reshape(2, 3),
    "c": np.float32(7),
}


@functools.partial(jax.jit, static_argnums=(1, 2))
def chunked(tree, count, specs=()):
    return [sliced(tree, number, count, specs) for number in range(count)]


@pytest.mark.parametrize("chunks", [1, 2, 4, 9])
def test_chunks_of_equal_size_hold_every_element(chunks):
    found = chunked(TREE, chunks)
    for name in ("float32", "float16"):
        assert len({chunk[name].shape for chunk in found}) == 1
    chex.assert_trees_all_equal(jax.jit(whole)(found, TREE), TREE)


def test_chunk_is_a_slice_of_every_array():
    first, last = chunked(TREE, 2)
    assert first["float32"].tolist() == [0, 1, 2, 7]
    assert last["float32"].tolist() == [3, 4, 0, 0]
    assert last["float16"].tolist() == [3, 4, 5]
    found = whole((first, jax.tree.map(jnp.negative, last)), TREE)
    assert found["b"].tolist() == [[0, 1, 2], [-3, -4, -5]]
    assert found["a"].tolist() == [0, 1, 2, -3, -4]
    assert found["c"] == 7


@pytest.mark.parametrize("number", [0, 1, jnp.int32(1)])
def test_chunk_is_added_to_its_own_elements(number):
    chunk = sliced(TREE, number, 2)
    found = added(TREE, jax.tree.map(lambda x: 10 * x, chunk), number, 2)
    parts = chunked(TREE, 2)
    parts[int(number)] = jax.tree.map(lambda x: 11 * x, chunk)
    chex.assert_trees_all_equal(found, jax.jit(whole)(parts, TREE))


@pytest.mark.parametrize("most", [0, _flat._MOST])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_pieces_change_no_other_element(monkeypatch, most, count):
    """Also not by a sum with zero, which would make -0.0 to 0.0."""
    monkeypatch.setattr(_flat, "_MOST", most)
    tree = {"a": np.full((2, 3), -0.0, np.float32)}
    lengths = -(-6 // count)
    for number in range(count):
        chunk = {"float32": np.arange(1.0, lengths + 1, dtype=np.float32)}
        wanted = tree["a"].reshape(-1).copy()
        place = wanted[number * lengths : (number + 1) * lengths]
        place += chunk["float32"][: place.size]
        found = added(tree, jax.tree.map(jnp.asarray, chunk), jnp.int32(number), count)
        assert_bits_equal(found["a"], wanted.reshape(2, 3))


def test_array_smaller_than_its_pieces_is_moved_in_place():
    """A padded copy would be an array of its own."""
    leaf, piece = jnp.zeros(100_000), {"float32": jnp.ones(1_429)}
    move = functools.partial(added, count=70)
    compiled = jax.jit(move, donate_argnums=0).lower([leaf], piece, 1).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < leaf.nbytes


def test_array_without_elements_is_cut():
    tree = {"a": np.zeros((0, 3), "f4"), "b": np.arange(3.0, dtype="f4")}
    chunks = chunked(tree, 2)
    chex.assert_trees_all_equal(whole(chunks, tree), tree)
    found = added(tree, chunks[0], 0, 2)
    assert found["b"].tolist() == [0, 2, 2]


def test_devices_with_the_same_shards_divide_their_elements():
    """Two devices hold halves of `a`, and both hold `b`."""
    mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
    tree = {"a": np.arange(4.0, dtype=np.float32), "b": np.arange(5, 8.0, dtype="f4")}
    specs = P("fsdp"), P()

    def on_groups(local):
        return jax.jit(on_mesh(local, mesh, P(), P(), "host"))

    first, last = on_groups(lambda tree: tuple(chunked(tree, 2, specs)))(tree)
    # Each device has an element of `a` and one of `b` in each chunk.
    assert first["float32"].tolist() == [0, 5, 2, 6]
    assert last["float32"].tolist() == [1, 7, 3, 0]
    found = on_groups(lambda chunks: whole(chunks, tree, specs))((first, last))
    chex.assert_trees_all_equal(jax.device_get(found), tree)
    found = on_groups(lambda tree, last: added(tree, last, 1, 2, specs))(tree, last)
    assert found["a"].tolist() == [0, 2, 2, 6]
    assert found["b"].tolist() == [5, 6, 14]
