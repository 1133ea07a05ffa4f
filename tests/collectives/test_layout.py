"""Tests the layout of arrays of several dtypes in two vectors, and its inverse."""

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.collectives import Layout, Summands

from ..helpers import assert_bits_equal, x64

SUMMANDS = Summands(
    coded=(np.float32([[1, 2, 3], [4, 5, 6]]), jnp.bfloat16([7, 8])),
    exact=(np.float32(9), jnp.bfloat16([10, 11])),
)


def test_gradients_and_exact_parts_are_joined_in_two_vectors():
    layout = Layout.of(jax.tree.map(jnp.asarray, SUMMANDS))
    coded, exact = layout.vectors(SUMMANDS)
    assert_bits_equal(coded, np.arange(1, 9, dtype=np.float32))
    assert_bits_equal(exact, np.arange(9, 12, dtype=np.float32))
    assert (layout.coded_size, layout.exact_size) == (8, 3)
    back = layout.arrays(coded, exact)
    assert_bits_equal(back, jax.tree.map(jnp.asarray, SUMMANDS))


def test_arrays_are_cut_from_the_front_of_padded_vectors():
    layout = Layout.of_shapes(((2,), (1, 2)), "bfloat16", exact=1)
    back = layout.arrays(jnp.arange(6.0), jnp.float32([9, 0]))
    coded = (jnp.bfloat16([0, 1]), jnp.bfloat16([[2, 3]]))
    assert_bits_equal(back, Summands(coded, (jnp.bfloat16([9]),)))


def test_single_float64_array_makes_all_sums_float64():
    """Arrays of half precision are summed in float32."""
    half, single, double = (
        jax.ShapeDtypeStruct((2,), dtype)
        for dtype in ("bfloat16", "float32", "float64")
    )
    assert Layout((half, half)).working_dtype == "float32"
    assert Layout((half, single)).working_dtype == "float32"
    assert Layout((half,), (double,)).working_dtype == "float64"
    assert Layout(()).working_dtype == "float32"
    with x64():
        coded, exact = Layout((half,), (double,)).vectors(
            Summands((jnp.bfloat16([1, 2]),), (jnp.float64([1 + 2.0**-52, 0]),))
        )
    assert_bits_equal(coded, np.float64([1, 2]))
    assert_bits_equal(exact, np.float64([1 + 2.0**-52, 0]))


def test_sum_of_float16_is_float32():
    layout = Layout.of_shapes(((2,),), "float16", exact=1)
    back = layout.arrays(jnp.float32([65536, 1]), jnp.float32([2]))
    assert_bits_equal(back, Summands((jnp.float32([65536, 1]),), (jnp.float32([2]),)))
    assert layout.sums() == Layout.of_shapes(((2,),), "float32", exact=1)


def test_piece_of_a_vector_has_no_shapes():
    layout = Layout.of_shapes(((2, 3), ()))
    assert layout.shapes == ((2, 3), ())
    assert layout._replace(whole=False).shapes is None
