"""Tests the orthonormal columns of low-rank codecs against a QR decomposition."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.codecs._orthonormal import orthonormal, restarted

from .conformance import normal


def matrix(*shape):
    return normal(math.prod(shape)).reshape(shape)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_columns_equal_a_qr_decomposition(scale):
    given = [matrix(8, 3), matrix(5, 2), matrix(4, 8, 3)]
    found = orthonormal([jnp.asarray(x * np.float32(scale)) for x in given])
    for before, after in zip(given, found, strict=True):
        q, r = np.linalg.qr(before.astype(np.float64))
        signs = np.sign(np.diagonal(r, axis1=-2, axis2=-1))[..., None, :]
        np.testing.assert_allclose(after, q * signs, atol=1e-5)


def test_dependent_column_becomes_zero():
    first = matrix(6, 1)
    given = np.concatenate([first, 3 * first, np.zeros_like(first)], axis=1)
    (found,) = orthonormal([jnp.asarray(given)])
    np.testing.assert_array_equal(found[:, 1:], 0)
    np.testing.assert_allclose(np.linalg.norm(found[:, 0]), 1, rtol=1e-6)


def test_nan_stays_in_columns():
    given = matrix(2, 4, 2)
    given[1, 0, 0] = np.nan
    (found,) = orthonormal([jnp.asarray(given)])
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).any()


def test_restarted_column_is_the_old_one_where_the_new_one_is_useless():
    new = jnp.array([[1.0, 0.0, jnp.nan], [-4.0, 0.0, 1.0]])
    found = restarted(new, jnp.full((2, 3), 7.0))
    np.testing.assert_array_equal(found, [[0.25, 7, 7], [-1, 7, 7]])
