"""Tests limits of stability by closed forms, and by properties of all limits."""

import functools

import numpy as np
import optax
import pytest

import pipejax as pj
from experiments.corrections import average_gradients
from pipejax import stability

from ..grid import each, grid
from .families import FAMILIES, averaged, decayed, heavy_ball, nesterov, sgd

# The limits of a plain delay.
max_curvature, max_learning_rate, spectral_radius = (
    functools.partial(limit, weight_prediction=False)
    for limit in (
        stability.max_curvature,
        stability.max_learning_rate,
        stability.spectral_radius,
    )
)


@pytest.mark.parametrize("width", each(range(1, 9), full=range(4, 8)))
def test_limit_of_sgd_equals_its_closed_form(width):
    # z^(K-1) (z - 1) = -x on the unit circle, which roots leave at the angle pi / (2 K
    # - 1).
    expected = 2 * np.sin(np.pi / (4 * width - 2))
    assert max_learning_rate(sgd, width) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
def test_limit_of_heavy_ball_equals_its_closed_forms(momentum):
    family = functools.partial(optax.sgd, momentum=momentum)
    assert max_learning_rate(family, 1) == pytest.approx(2 * (1 + momentum), rel=1e-6)
    assert max_learning_rate(family, 2) == pytest.approx(1 - momentum, rel=1e-6)


def test_limit_of_nesterov_equals_its_closed_form():
    # At z = -1, 2 (1 + mu) = x (1 + 2 mu).
    expected = 2 * 1.9 / 2.8
    assert max_learning_rate(nesterov, 1) == pytest.approx(expected, rel=1e-6)
    assert max_learning_rate(nesterov, 2) == pytest.approx(0.253, rel=2e-3)


def test_curvature_and_learning_rate_trade_one_to_one():
    assert max_learning_rate(heavy_ball, 2, curvature=20.0) == pytest.approx(0.005)
    assert max_curvature(heavy_ball(0.005), 2) == pytest.approx(20.0, rel=1e-5)


def test_weight_decay_counts_as_curvature():
    # w - eta (g + 0.5 w) is stable up to eta (lambda + 0.5) = 2.
    assert max_curvature(decayed(0.1), 1) == pytest.approx(19.5)


def test_zero_learning_rate_is_always_stable():
    assert max_curvature(optax.sgd(0.0), 2) == np.inf


def test_negative_learning_rate_is_never_stable():
    assert max_curvature(optax.sgd(-0.1), 2) == 0.0


@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_spectral_radius_is_1_at_the_limit(name, width, predicts):
    tx, how = FAMILIES[name](1.0), {"weight_prediction": predicts}
    limit = stability.max_curvature(tx, width, **how)
    below, at, above = (
        stability.spectral_radius(tx, width, factor * limit, **how)
        for factor in (0.99, 1.0, 1.01)
    )
    assert below < 1 < above
    assert at == pytest.approx(1, abs=1e-6)


CORRECTED = {
    "nothing": lambda momentum, width: optax.identity(),
    "last update": lambda _, width: pj.transforms.extrapolate_updates(width - 1),
    "robust": pj.transforms.delay_robust,
}


@grid(
    momentum=[0.9, 0.999],
    rate=[1.0, 1e-3, 1e10],
    family=[optax.sgd, averaged],
    correction=CORRECTED,
)
def test_limit_of_a_plain_delay_is_found_at_any_scale(
    momentum, rate, family, correction
):
    for width in (2, 6, 16):
        correct = CORRECTED[correction](momentum, width)
        tx = optax.chain(correct, family(rate, momentum))
        limit = max_curvature(tx, width)
        radii = [
            spectral_radius(tx, width, share * limit) for share in (0.05, 0.999, 1.001)
        ]
        assert all(radius < 1 for radius in radii[:-1]), width
        assert radii[-1] > 1, width


@pytest.mark.parametrize("width", each(range(2, 9), full=range(4, 8)))
def test_limit_of_predicted_sgd_equals_its_closed_form(width):
    # z^(K-1) + x (z^(K-2) + ... + 1) has roots of unity at x = 1.
    limit = stability.max_learning_rate(sgd, width)
    assert limit == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
def test_limit_of_predicted_heavy_ball_equals_its_closed_forms(momentum):
    family = functools.partial(optax.sgd, momentum=momentum)
    at_2, at_3 = (stability.max_learning_rate(family, width) for width in (2, 3))
    assert at_2 == pytest.approx(1, rel=1e-6)
    assert at_3 == pytest.approx(1 / (1 + momentum), rel=1e-6)


@grid(4, momentum=[0.0, 0.5, 0.9, 0.99], share=[0.0, 0.3, 0.5, 0.8, 0.95, 0.99, 1.0])
def test_limit_with_a_share_at_once_equals_its_closed_form(momentum, share):
    family = functools.partial(optax.sgd, momentum=momentum)
    bounds = [(1 - momentum) / (1 - share)] if share < 1 else []
    if share > 0.5:
        bounds.append(2 * (1 + momentum) / (2 * share - 1))
    found = stability.max_learning_rate(family, 2, at_once=share)
    assert found == pytest.approx(min(bounds), rel=1e-6)


@pytest.mark.parametrize("width", [1, 3])
def test_no_share_and_the_whole_at_once_are_known_limits(width):
    limit = functools.partial(stability.max_learning_rate, heavy_ball, width)
    assert limit(at_once=0.0) == limit(weight_prediction=False)
    assert limit(at_once=1.0) == pytest.approx(3.8, rel=1e-6)
    with pytest.raises(ValueError, match=r"`at_once` must be a share from 0 to 1"):
        limit(at_once=1.5)
    with pytest.raises(ValueError, match=r"`at_once` must be a share .*got True"):
        limit(at_once=True)


def test_limit_is_found_for_divergence_to_one_side():
    # The root of z - 1.7 x leaves the unit circle at z = 1.
    taps = (-1.7, 2.43, -0.729)

    def respond(gradient, state, params=None):
        past = (gradient, *state[:2])
        return -sum(a * b for a, b in zip(taps, past, strict=True)), past

    tx = optax.GradientTransformation(lambda w: (w, w, w), respond)
    limit = stability.max_curvature(tx, 2)
    assert 0 < limit == pytest.approx(1 / 1.7)
    assert stability.spectral_radius(tx, 2, 1.01 * limit) > 1


@pytest.mark.parametrize("name", FAMILIES)
def test_prediction_changes_no_limit_at_width_1(name):
    tx = FAMILIES[name](0.1)
    assert stability.max_curvature(tx, 1) == max_curvature(tx, 1)


def test_limit_may_be_set_by_the_mean_over_devices():
    """The newest of eight averaged gradients deviates, and it is only an eighth."""
    tx = optax.chain(average_gradients(8), optax.sgd(1.0))
    assert stability.max_curvature(tx, 2) == stability.max_curvature(tx, 1)


def test_rate_family_without_proportionality_is_refused():
    with pytest.raises(ValueError, match="proportional to its learning rate"):
        max_learning_rate(lambda rate: optax.sgd(0.1 + rate), 2)


@pytest.mark.parametrize("curvature", [0.0, -1.0, float("nan"), "a"])
def test_curvature_of_a_rate_must_be_above_zero(curvature):
    with pytest.raises(ValueError, match="`curvature` must be a number above 0"):
        max_learning_rate(sgd, 2, curvature=curvature)


@pytest.mark.parametrize("curvature", [-1.0, float("inf"), float("nan"), "a"])
def test_curvature_of_a_radius_must_not_be_negative(curvature):
    with pytest.raises(
        ValueError, match="`curvature` must be a finite number of at least 0"
    ):
        spectral_radius(optax.sgd(0.1), 2, curvature)


def test_function_in_place_of_an_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"`tx` must be an optax.Grad.*got function"):
        max_curvature(optax.sgd, 2)


def test_width_must_be_at_least_1():
    with pytest.raises(ValueError, match="`width` must be an integer of at least 1"):
        max_curvature(optax.sgd(0.1), 0)


@pytest.mark.parametrize(
    ("share", "limit"), [(0.0, 0.1), (0.8, 0.5), (0.95, 2.0), (0.96, 2.5)]
)
def test_known_share_has_the_limit_of_the_document(share, limit):
    """Heavy-ball with momentum 0.9, of whose gradient a share is known at once."""
    found = stability.max_learning_rate(heavy_ball, 2, at_once=share)
    assert found == pytest.approx(limit, rel=1e-3)
