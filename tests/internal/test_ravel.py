"""Tests joining arrays in one vector, and the inverse, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._internal.ravel import ravel, unravel, working_dtype

from ..helpers import assert_bits_equal

RNG = np.random.default_rng(0)
ARRAYS = {
    "every rank": [RNG.normal(size=s).astype(np.float32) for s in ((2, 3), (), (4,))],
    "one": [np.arange(6, dtype=np.float32).reshape(2, 3)],
    "an empty one": [np.ones(2, np.float32), np.ones((0, 5), np.float32)],
    "integers": [np.arange(3), np.arange(4).reshape(2, 2)],
    "none": [],
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ARRAYS)
def test_joined_equals_its_twin_and_apart_is_its_inverse(name, compiled):
    arrays = list(map(jnp.asarray, ARRAYS[name]))
    vector = (jax.jit(ravel) if compiled else ravel)(arrays)
    wanted = [np.ravel(x) for x in arrays] or [np.zeros(0, np.float32)]
    assert_bits_equal(vector, np.concatenate(wanted))
    cut = jax.jit(unravel) if compiled else unravel
    assert_bits_equal(list(cut(vector, arrays)), arrays)


def test_joined_vector_has_one_dtype_and_apart_restores_each():
    arrays = [jnp.float32([1.25, 2]), jnp.bfloat16([[3], [4]])]
    vector = ravel(arrays, jnp.float32)
    assert_bits_equal(vector, np.float32([1.25, 2, 3, 4]))
    assert_bits_equal(list(unravel(vector, arrays)), arrays)


def test_apart_ignores_elements_beyond_the_forms():
    vector = jnp.float32([1, 2, np.nan])
    form = jax.ShapeDtypeStruct((2, 1), "float32")
    assert_bits_equal(unravel(vector, [form]), (np.float32([[1], [2]]),))


def test_joined_and_apart_keep_every_bit():
    """The arrays hold infinities, NaNs with a payload, denormals and negative zero."""
    bits = np.array(
        [0x7F800000, 0xFF800000, 0x7FC12345, 0x00000001, 0x80000000, 0x7F7FFFFF],
        np.uint32,
    )
    arrays = bits[:2].view(np.float32), bits[2:].view(np.float32)
    vector = jax.jit(ravel)(arrays)
    np.testing.assert_array_equal(np.asarray(vector).view(np.uint32), bits)
    back = jax.jit(unravel)(vector, arrays)[1]
    np.testing.assert_array_equal(np.asarray(back).view(np.uint32), bits[2:])


def test_joined_is_differentiable():
    """The gradient of a weighted sum is the weights, in the shapes of the arrays."""
    arrays = jnp.ones((2, 2)), jnp.ones(3)
    weights = jnp.arange(7.0)
    found = jax.jit(jax.grad(lambda x: ravel(x) @ weights))(arrays)
    assert_bits_equal(found, unravel(weights, arrays))


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        ("float64", "float64"),
        ("float32", "float32"),
        ("bfloat16", "float32"),
        ("float16", "float32"),
    ],
)
def test_working_dtype_is_at_least_float32(dtype, wanted):
    assert working_dtype(dtype) == wanted
