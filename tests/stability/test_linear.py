"""Tests optimizers as matrices: some by hand, and the refusal of nonlinear ones."""

import functools

import numpy as np
import optax
import pytest

from pipejax import stability
from pipejax.stability._linear import linear_update

from .families import averaged, decayed, heavy_ball, nesterov, sgd

# The limit of a plain delay.
max_curvature = functools.partial(stability.max_curvature, weight_prediction=False)

MATRICES = {
    # w' = w - eta g
    "sgd": (sgd(0.1), [[1]], [-0.1]),
    # w' = w - eta (g + 0.5 w)
    "decayed": (decayed(0.1), [[0.95]], [-0.1]),
    # m' = mu m + g, w' = w - eta m'
    "momentum": (heavy_ball(0.1), [[0.9, 0], [-0.09, 1]], [1, -0.1]),
    # m' as above, w' = w - eta (g + mu m')
    "nesterov": (nesterov(0.1), [[0.9, 0], [-0.081, 1]], [1, -0.19]),
    # A learning rate in the state is a constant.
    "injected": (
        optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9),
        [[0.9, 0], [-0.09, 1]],
        [1, -0.1],
    ),
    # m' = b m + (1 - b) g after the bias correction has ended, w' = w - eta m'
    "average": (
        averaged(0.1),
        [[0.9, 0], [-0.09, 1]],
        [0.1, -0.01],
    ),
}


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_equal_matrices_by_hand(name):
    tx, state, gradient = MATRICES[name]
    found = linear_update(tx)
    # Float32 constants inside an optimizer may have 24 bits.
    np.testing.assert_allclose(found.state, state, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(found.gradient, gradient, rtol=1e-6, atol=1e-12)


def clipped(clip, **options):
    return optax.chain(clip, optax.sgd(0.1, **options))


@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(1e-3),
        optax.sign_sgd(0.1),
        *(clipped(optax.clip(most)) for most in (1e-12, 0.5, 1.0, 1e6, 1e20)),
        clipped(optax.clip_by_global_norm(0.5)),
        clipped(optax.clip_by_global_norm(100.0), momentum=0.9),
        clipped(optax.adaptive_grad_clip(100.0)),
        optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
    ],
)
def test_nonlinear_optimizer_is_refused(tx):
    with pytest.raises(ValueError, match="must be linear in its gradients"):
        max_curvature(tx, 2)


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(optax.cosine_decay_schedule(0.1, 1000), momentum=0.9),
        optax.MultiSteps(optax.sgd(0.1), 4),
    ],
)
def test_optimizer_at_rest_in_the_end_is_refused(tx):
    with pytest.raises(ValueError, match="must still move parameters at step 1048576"):
        max_curvature(tx, 2)


def test_schedule_counts_by_its_last_rate():
    tx = optax.sgd(optax.linear_schedule(0.0, 0.1, 1000), momentum=0.9)
    assert max_curvature(tx, 2) == pytest.approx(1.0, rel=1e-6)


def test_flag_of_a_first_step_has_its_later_value():
    """Its first update is `-0.1 g`, and all others `-0.1 (2 g - g_before)`."""
    found = linear_update(optax.optimistic_gradient_descent(0.1))
    np.testing.assert_allclose(found.gradient[-1], -0.2, rtol=1e-6)
    limits = [
        stability.max_learning_rate(optax.optimistic_gradient_descent, width)
        for width in (1, 2)
    ]
    np.testing.assert_allclose(limits, [2 / 3, 1 / 2], rtol=1e-3)


def test_number_in_a_state_is_read_as_an_array():
    def init(params):
        return 0.0

    def update(updates, state, params=None):
        return -0.1 * updates, 0.9 * state + updates

    found = linear_update(optax.GradientTransformation(init, update))
    np.testing.assert_allclose(found.state, [[0.9, 0], [0, 1]], rtol=1e-6)
