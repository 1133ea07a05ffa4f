"""Tests that a pytree in chunks is the same pytree again."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._core.rounds._flat import chunk_of, chunked, whole, with_chunk

TREE = {
    "a": np.arange(5, dtype=np.float32),
    "b": np.arange(6, dtype=np.float16).reshape(2, 3),
    "c": np.float32(7),
}


@pytest.mark.parametrize("chunks", [1, 2, 4, 9])
def test_chunks_of_equal_size_hold_every_element(chunks):
    flat = chunked(TREE, chunks)
    assert {name: rows.shape[0] for name, rows in flat.items()} == {
        "float32": chunks,
        "float16": chunks,
    }
    chex.assert_trees_all_equal(whole(flat, TREE), TREE)


def test_chunk_is_replaced_in_its_place():
    flat = chunked(TREE, 2)
    chunk = {name: -row for name, row in chunk_of(flat, jnp.int32(1)).items()}
    assert chunk["float16"].tolist() == [-3, -4, -5]
    found = whole(with_chunk(flat, jnp.int32(1), chunk), TREE)
    assert found["b"].tolist() == [[0, 1, 2], [-3, -4, -5]]
    assert found["a"].tolist() == [0, 1, 2, -3, -4]
    assert found["c"] == -7
