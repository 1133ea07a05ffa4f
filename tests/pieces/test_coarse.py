"""Tests coarse copies of arrays that are split over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.pieces import CoarseForm
from pipejax.pieces._coarse import TURNS, decoded, encoded


def test_errors_are_below_a_fifth_over_63_powers_of_two():
    rng = np.random.default_rng(0)
    x = np.float32(2.0 ** rng.uniform(-62, 0, 5000) * rng.choice([-1, 1], 5000))
    x[0] = 1.0
    error = np.abs(np.asarray(decoded(*encoded(jnp.asarray(x)))) / x - 1)
    assert 0.15 < error.max() <= 0.2


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e30])
def test_zeros_signs_and_scales(scale):
    x = jnp.float32([1.0, -2.0, 0.0, 2.0**-70, -(2.0**-60)]) * scale
    found = decoded(*encoded(x)) / jnp.float32(scale)
    np.testing.assert_allclose(found[:2], [1, -2], rtol=0.2)
    np.testing.assert_array_equal(found[2:4], 0)
    np.testing.assert_array_equal(jnp.sign(found), [1, -1, 0, 0, -1])


def test_zeros_alone():
    np.testing.assert_array_equal(decoded(*encoded(jnp.zeros(3))), 0)


FORM = CoarseForm(
    (jax.ShapeDtypeStruct((2, 5), "float32"), jax.ShapeDtypeStruct((3, 1), "float32")),
    (0, 1),
    4,
)


def whole(scale):
    """Returns arrays that a code represents exactly, so that copies are exact."""
    first = 2.0 ** np.arange(40).reshape(8, 5)
    second = -(2.0 ** -np.arange(12).reshape(3, 4))
    return [np.float32(first * scale), np.float32(second * scale)]


def test_copies_of_whole_arrays():
    for found, wanted in zip(FORM.arrays(FORM.of(whole(1))), whole(1), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_every_element_is_renewed_in_turn():
    """The rows stand for devices, each of which sends a slice of its pieces."""
    coarse, new = FORM.of(whole(1)), whole(2)
    for turn in range(TURNS):
        assert int(coarse.turn) == turn
        cut = [np.split(x, 4, axis) for x, axis in zip(new, FORM.cuts, strict=True)]
        apart = zip(*cut, strict=True)
        sent = jnp.concatenate([FORM.slice(pieces, coarse) for pieces in apart])
        coarse = FORM.renewed(coarse, sent)
    for found, wanted in zip(FORM.arrays(coarse), new, strict=True):
        np.testing.assert_array_equal(found, wanted)
