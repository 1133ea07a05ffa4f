"""Tests slopes in 8 bits."""

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._core.prediction import CODE, Slopes
from pipejax._core.prediction._slopes import decoded, encoded


def test_error_of_a_slope_is_at_most_a_sixteenth():
    steepest = jnp.float32(3e-5)
    sizes = 3e-5 * 2.0 ** -np.linspace(0, 14, 1000)
    slopes = jnp.float32([*sizes, *-sizes])
    found = decoded(encoded(slopes, steepest, CODE), steepest)
    np.testing.assert_allclose(found, slopes, rtol=1 / 16)


@pytest.mark.parametrize("slope", [0.0, 1e-30])
def test_bound_of_zero_gives_zero_slopes(slope):
    nothing = jnp.float32(0)
    assert decoded(encoded(jnp.float32([slope]), nothing, CODE), nothing) == 0


def test_slopes_beyond_the_bound_become_the_bound():
    bound = jnp.float32(0.7)
    code = encoded(jnp.float32([5.0, -5.0, 0.7]), bound, CODE)
    np.testing.assert_allclose(decoded(code, bound), [0.7, -0.7, 0.7], rtol=1e-6)


def test_slopes_in_other_dtypes_are_exact():
    slopes = jnp.float32([1.234567, -3e-12])
    code = encoded(slopes, jnp.float32(0.1), jnp.float32)
    np.testing.assert_array_equal(decoded(code, jnp.float32(0.1)), slopes)


def test_slopes_are_decoded_for_each_gradient_in_flight():
    bounds = {"w": jnp.float32(2.0)}
    codes = tuple({"w": encoded(jnp.float32([x]), bounds["w"], CODE)} for x in (1, 2))
    first, second = Slopes(codes, (bounds, bounds)).decoded()
    assert (first["w"], second["w"]) == (1, 2)
