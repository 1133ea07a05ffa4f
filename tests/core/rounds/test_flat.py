"""Tests that a pytree in chunks is the same pytree again."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._core.rounds._flat import chunked, whole

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
