"""Tests which messages are applied, and the norm of an update in two parts."""

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._core.message import Message, Passengers, Reduced
from pipejax._core.step._part import decided, norm_of_both


def reduced(gradients, valid=True, weight=None):
    """Returns the sum of one device's gradients."""
    passengers = Passengers.of(jnp.float32(1), None, weight)
    message = Message(gradients, None, passengers)
    return Reduced.of(message, jnp.array(valid))


@pytest.mark.parametrize(
    ("valid", "weight", "value", "skip_nonfinite", "wanted"),
    [
        (True, None, 1.0, True, (True, False)),
        (False, None, 0.0, True, (False, False)),
        (True, 0.0, 0.0, True, (False, False)),
        (True, 3.0, np.nan, True, (False, True)),
        (True, None, np.inf, False, (True, False)),
        # What has not arrived is not counted as skipped.
        (False, None, np.nan, True, (False, False)),
    ],
)
def test_finite_messages_of_some_weight_are_applied(
    valid, weight, value, skip_nonfinite, wanted
):
    weight = None if weight is None else jnp.float32(weight)
    message = reduced({"w": jnp.full(2, value)}, valid, weight)
    part = decided(message, skip_nonfinite=skip_nonfinite)
    assert (bool(part.applies), bool(part.skips)) == wanted


@pytest.mark.parametrize(
    ("late_applies", "rest_applies"),
    [(True, True), (True, False), (False, True), (False, False)],
)
def test_norm_covers_every_applied_part(late_applies, rest_applies):
    rng = np.random.default_rng(0)
    both, alone, other = (rng.normal(size=3).astype(np.float32) for _ in range(3))
    late = reduced({"both": jnp.array(both), "late": jnp.array(alone), "rest": None})
    rest = reduced({"both": jnp.array(other), "late": None, "rest": jnp.array(alone)})
    parts = [
        decided(part, skip_nonfinite=True)._replace(applies=jnp.array(applies))
        for part, applies in ((late, late_applies), (rest, rest_applies))
    ]
    # Nothing is applied: the norm is that of all that has come.
    none = not (late_applies or rest_applies)
    a, b = late_applies or none, rest_applies or none
    given = np.concatenate([a * both + b * other, a * alone, b * alone])
    found = norm_of_both(*parts, devices=1)
    np.testing.assert_allclose(found, np.linalg.norm(given), rtol=1e-6)


def test_norm_of_a_sum_is_divided_by_the_weight():
    late, rest = (
        reduced({"w": jnp.array([value])}, weight=jnp.float32(4))
        for value in (8.0, 12.0)
    )
    parts = (decided(part, skip_nonfinite=True) for part in (late, rest))
    assert float(norm_of_both(*parts, devices=2)) == pytest.approx(5.0)
