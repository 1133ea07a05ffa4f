"""Tests that finiteness and squares of arrays are found in one pass over each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._internal.finite import check, check_all, check_sharded, sum_of_squares

from ..grid import grid

SHAPES = [(3,), (70000,), (300, 400), (3, 3, 96, 128)]
ASKED = {
    "both": lambda x: check_all([x]),
    "finiteness": lambda x: check_all([x])[0],
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("shape", SHAPES)
def test_array_is_read_once(shape, asked):
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    cost = jax.jit(ASKED[asked]).lower(x).compile().cost_analysis()
    assert cost["bytes accessed"] <= 1.02 * 4 * x.size + 500


@pytest.mark.parametrize("found_by", [check, check_sharded])
@pytest.mark.parametrize("shape", SHAPES)
def test_squares_equal_numpy(shape, found_by):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    finite, squares = jax.jit(found_by)(x)
    assert finite
    wanted = np.square(x.astype(np.float64)).sum()
    np.testing.assert_allclose(squares, wanted, rtol=1e-5)
    np.testing.assert_allclose(sum_of_squares(x), wanted, rtol=1e-5)


def test_small_elements_of_a_long_array_are_not_lost():
    """One sum after another would end at 2**24 equal elements."""
    assert check(jnp.ones((2**13, 2**13), jnp.bfloat16))[1] == 2**26


@grid(1, place=[0, 77777, -1], bad=[np.inf, -np.inf, np.nan])
def test_single_bad_element_is_found(bad, place):
    x = np.zeros(300 * 400, np.float32)
    x[place] = bad
    good, both = jnp.ones(5), jnp.asarray(x.reshape(300, 400))
    assert not check_all([good, both])[0]
    assert not check_sharded(both)[0]


@pytest.mark.parametrize("shape", [(2**25 + 4,), (1, 2**25), (2**25, 1), (2**23, 4)])
def test_squares_of_a_long_array_lose_none(shape):
    """One after another, float32 adds no more than 2^24 ones."""
    assert jax.jit(check)(jnp.ones(shape))[1] == np.prod(shape)
    bad = jnp.ones(shape).at[(-1,) * len(shape)].set(np.nan)
    assert not jax.jit(check)(bad)[0]


def test_no_arrays_are_finite():
    finite, squares = check_all([])
    assert finite
    assert squares.shape == (0,)
