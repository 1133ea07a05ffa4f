"""Tests the leaves that stand for a gradient with a number of elements."""

import math

import pytest

from pipejax import timing


def test_square_leaves_are_matrices_rows_and_a_vector():
    """Leaves are matrices of 2^20 elements, rows of 2^10, and a vector."""
    assert timing.square_leaves(3) == ((3,),)
    assert timing.square_leaves(2**21) == ((1024, 1024),) * 2
    found = timing.square_leaves(2**20 + 2**10 + 1)
    assert found == ((1024, 1024), (1, 1024), (1,))


@pytest.mark.parametrize("elements", [1, 1023, 1024, 1025, 2**20 - 1, 3_000_000])
def test_square_leaves_hold_all_elements_and_none_is_empty(elements):
    sizes = [math.prod(shape) for shape in timing.square_leaves(elements)]
    assert sum(sizes) == elements
    assert min(sizes) > 0


def test_leaves_of_a_gradient_without_elements_are_refused():
    with pytest.raises(ValueError, match=r"^`elements` must be a whole number of elem"):
        timing.square_leaves(0)
