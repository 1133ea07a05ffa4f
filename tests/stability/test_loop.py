"""Tests loops as matrices: polynomials by hand, and steps against a queue by hand."""

import numpy as np
import pytest

from pipejax.stability._linear import LinearUpdate, linear_update
from pipejax.stability._loop import deviations, loop

from .families import heavy_ball, sgd

ETA, MU = 0.1, 0.9


def update_of(family):
    """Writes the update in float64, because an optimizer has float32 constants."""
    if family is sgd:
        return LinearUpdate(np.eye(1), np.array([-ETA]))
    state = np.array([[MU, 0.0], [-ETA * MU, 1.0]])
    return LinearUpdate(state, np.array([1.0, -ETA]))


@pytest.mark.parametrize("family", [sgd, heavy_ball])
def test_updates_by_hand_equal_the_optimizers(family):
    for found, wanted in zip(
        linear_update(family(ETA)), update_of(family), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "width", "p", "q"),
    [
        # p = z - 1, q = eta
        (sgd, 1, [1, -1], [0, ETA]),
        # p = z (z - 1), q = eta
        (sgd, 2, [1, -1, 0], [0, 0, ETA]),
        # p = z^3 (z - 1), q = eta
        (sgd, 4, [1, -1, 0, 0, 0], [0, 0, 0, 0, ETA]),
        # p = (z - 1) (z - mu), q = eta z
        (heavy_ball, 1, [1, -1 - MU, MU], [0, ETA, 0]),
        # p = z (z - 1) (z - mu), q = eta z
        (heavy_ball, 2, [1, -1 - MU, MU, 0], [0, 0, ETA, 0]),
    ],
)
def test_polynomials_equal_polynomials_by_hand(family, width, p, q):
    found = loop(update_of(family), width).polynomials()
    np.testing.assert_allclose(found[0], p, rtol=1e-12)
    np.testing.assert_allclose(found[1], q, rtol=1e-12)
    # A remainder of rounding in place of a zero would be a root.
    assert (found[0] == 0).tolist() == [x == 0 for x in p]
    assert (found[1] == 0).tolist() == [x == 0 for x in q]


@pytest.mark.parametrize(
    ("width", "q"),
    [
        (2, [0, ETA]),  # z + lambda eta
        (3, [0, ETA, (1 + MU) * ETA]),  # z^2 + lambda (eta z + (1 + mu) eta)
    ],
)
def test_polynomials_of_deviations_equal_polynomials_by_hand(width, q):
    found = deviations(update_of(heavy_ball), width).polynomials()
    np.testing.assert_allclose(found[0], [1] + (width - 1) * [0], atol=0)
    np.testing.assert_allclose(found[1], q, rtol=1e-12)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_step_of_the_matrix_equals_a_step_of_the_recursion(width):
    """`w[t+1] = w[t] - eta m`, `m = mu m + lambda w[t-K+1]`, starting from zeros."""
    curvature, w, m, queue = 2.5, 1.0, 0.0, [0.0] * (width - 1)
    matrix = loop(update_of(heavy_ball), width).matrix(curvature)
    state = np.array([m, w, *queue])
    for _ in range(6):
        queue.append(curvature * w)
        m = MU * m + queue.pop(0)
        w -= ETA * m
        state = matrix @ state
        np.testing.assert_allclose(state, [m, w, *queue], rtol=1e-12)
