"""Tests the corrections that are only compared with: by hand, and without a delay."""

import jax.numpy as jnp
import pytest

from experiments.corrections import average_gradients, delay_compensation

from ..transforms.helpers import assert_changes_nothing, assert_keeps_form, outputs

BY_WIDTH = {"average": average_gradients, "compensate": delay_compensation}


def test_average_covers_the_gradients_received_up_to_now():
    assert outputs(average_gradients(3), [3, 6, 9, 12, 0]) == [3, 4.5, 6, 9, 7]


def test_compensation_carries_over_a_gradient_of_known_curvature():
    """With curvature `g * g`, a correction of strength g^2 (w - v) / |g| is added."""
    tx = delay_compensation(2, strength=0.5, decay=0.0, eps=1e-20)
    state = tx.init(jnp.float32(1.0))
    # The first gradient is applied where it was taken, the next ones an update later.
    first, state = tx.update(jnp.float32(2.0), state, jnp.float32(1.0))
    assert float(first) == 2.0
    second, state = tx.update(jnp.float32(2.0), state, jnp.float32(4.0))
    assert float(second) == pytest.approx(2.0 + 0.5 * 2.0 * (4.0 - 1.0), rel=1e-5)
    third, state = tx.update(jnp.float32(-3.0), state, jnp.float32(5.0))
    assert float(third) == pytest.approx(-3.0 + 0.5 * 3.0 * (5.0 - 4.0), rel=1e-5)


@pytest.mark.parametrize("name", BY_WIDTH)
def test_state_keeps_structure_and_dtypes(name):
    assert_keeps_form(BY_WIDTH[name](2))


@pytest.mark.parametrize("name", BY_WIDTH)
def test_corrections_change_nothing_without_a_delay(name):
    assert_changes_nothing(BY_WIDTH[name](1))
