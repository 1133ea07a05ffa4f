"""Tests delay compensation by hand on a gradient of known curvature."""

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import corrections

from .helpers import TREE, outputs


def test_compensation_carries_a_gradient_of_a_known_curvature_over():
    """With curvature `g * g`, a correction of strength g^2 (w - v) / |g| is added."""
    tx = corrections.delay_compensation(2, strength=0.5, decay=0.0, eps=1e-20)
    state = tx.init(jnp.float32(1.0))
    # The first gradient is applied where it was taken, the next ones an update later.
    first, state = tx.update(jnp.float32(2.0), state, jnp.float32(1.0))
    assert float(first) == 2.0
    second, state = tx.update(jnp.float32(2.0), state, jnp.float32(4.0))
    assert float(second) == pytest.approx(2.0 + 0.5 * 2.0 * (4.0 - 1.0), rel=1e-5)
    third, state = tx.update(jnp.float32(-3.0), state, jnp.float32(5.0))
    assert float(third) == pytest.approx(-3.0 + 0.5 * 3.0 * (5.0 - 4.0), rel=1e-5)


def test_compensation_without_delay_changes_nothing():
    tx = corrections.delay_compensation(1)
    assert outputs(tx, [1, -5], jnp.float32(2)) == [1, -5]


def test_compensation_asks_for_parameters():
    tx = corrections.delay_compensation(2)
    with pytest.raises(ValueError, match="`params` must be given"):
        tx.update(TREE, tx.init(TREE))


@pytest.mark.parametrize(
    ("width", "options", "message"),
    [
        (0, {}, "`width` must be an integer"),
        (2, {"strength": -1.0}, "`strength` must be a finite number of at least 0"),
        (2, {"strength": np.inf}, "`strength` must be a finite number of at least 0"),
        (2, {"decay": 1.0}, "`decay` must lie in"),
        (2, {"eps": 0.0}, "`eps` must be a number"),
    ],
)
def test_bad_input_is_refused(width, options, message):
    with pytest.raises(ValueError, match=message):
        corrections.delay_compensation(width, **options)
