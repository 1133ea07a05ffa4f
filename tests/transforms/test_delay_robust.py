"""Tests delay-robust momentum: its filter by hand, its stability and its noise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pipejax import transforms

from ..grid import grid
from .helpers import max_learning_rate, outputs


def robust(momentum, width, **options):
    return lambda rate: optax.chain(
        transforms.delay_robust(momentum, width, **options), optax.sgd(rate, momentum)
    )


def test_robust_momentum_equals_its_recursion_by_hand():
    """`u = k g + (h - k) EMA_beta(g)`, h = 1: k = 1/2 at mu = 0.6, w = pi/3 at K=2."""
    gradients = np.random.default_rng(0).normal(size=20)
    slow = 1 - np.pi / 3 / 2 / 8
    average, wanted = 0.0, []
    for gradient in gradients:
        average = slow * average + (1 - slow) * gradient
        wanted.append(-(gradient / 2 + average / 2))
    found = outputs(robust(0.6, 2)(0.4), gradients)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_robust_momentum_may_stand_on_either_side_of_sgd():
    gradients = np.random.default_rng(0).normal(size=20)
    after = optax.chain(optax.sgd(0.1, 0.9), transforms.delay_robust(0.9, 2))
    before = outputs(robust(0.9, 2)(0.1), gradients)
    np.testing.assert_allclose(outputs(after, gradients), before, rtol=1e-4, atol=1e-6)


@grid(1, width=[2, 3, 4], momentum=[0.5, 0.9, 0.99])
def test_robust_momentum_is_nearly_as_stable_as_sgd_at_its_share(width, momentum):
    """The rest of the lag costs up to an eighth of SGD's limit at this share."""
    at_rate_1 = 2 * np.sin(np.pi / (4 * width - 2))
    of_noise = np.sqrt((1 - momentum) / (1 + momentum))
    of_lag = (1 - momentum) / (1 + momentum)
    for share, given in ((of_noise, {}), (of_lag, {"share": of_lag})):
        limit = max_learning_rate(robust(momentum, width, **given), width)
        sgd = at_rate_1 * (1 - momentum) / share
        assert 0.85 * sgd < limit <= sgd


@pytest.mark.parametrize(("momentum", "more"), [(0.5, 1.2), (0.9, 1.2), (0.99, 1.5)])
def test_robust_momentum_amplifies_noise_like_heavy_ball(momentum, more):
    """Amplifies noise as heavy ball does, plus nearly `pi / 48 / share` at K=2."""
    impulse = jnp.zeros(2000).at[0].set(1)

    def response(tx):
        def step(state, gradient):
            update, state = tx.update(gradient, state)
            return state, update

        return jax.lax.scan(step, tx.init(jnp.float32(0)), impulse)[1]

    before, after = (
        float(jnp.linalg.norm(response(tx)))
        for tx in (optax.sgd(0.1, momentum), robust(momentum, 2)(0.1))
    )
    assert before < after < more * before


def test_robust_momentum_uses_the_given_share_and_decay():
    found = outputs(robust(0.5, 2, share=0.25, decay=0.0)(0.5), [1.0, -3.0, 2.0])
    # With decay 0, the average is over one gradient.
    np.testing.assert_allclose(found, [-1.0, 3.0, -2.0], rtol=1e-6)
    found = outputs(robust(0.5, 2, share=0.25, decay=0.5)(0.5), [1.0, 0.0, 0.0])
    np.testing.assert_allclose(found, [-0.625, -0.1875, -0.09375], rtol=1e-6)


def test_robust_momentum_without_momentum_changes_nothing():
    assert outputs(transforms.delay_robust(0.0, 2), [3, -5]) == [3, -5]


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan"), "a"])
def test_robust_momentum_refuses_a_momentum_out_of_range(momentum):
    with pytest.raises(ValueError, match=r"`momentum` must lie in \[0, 1\)"):
        transforms.delay_robust(momentum, 2)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("share", 0.0),
        ("share", 1.1),
        ("share", True),
        ("decay", 1.0),
        ("decay", float("nan")),
    ],
)
def test_robust_momentum_refuses_a_share_or_decay_out_of_range(option, value):
    with pytest.raises(ValueError, match=f"`{option}` must lie in"):
        transforms.delay_robust(0.9, 2, **{option: value})


@pytest.mark.parametrize("updates", ["float32", "bfloat16"])
def test_dtypes_of_updates_and_state_stay(updates):
    tx, params = transforms.delay_robust(0.9, 2), jnp.ones(3, "bfloat16")
    g = jnp.ones(3, updates)
    state = tx.init(params)
    found, after = tx.update(g, state, params)
    assert found.dtype == g.dtype
    assert [x.dtype for x in jax.tree.leaves(after)] == [
        x.dtype for x in jax.tree.leaves(state)
    ]


def test_decay_near_one_is_kept_in_16_bits():
    """bfloat16 would round 0.999 to 1, and the average would never fall."""
    tx = transforms.delay_robust(0.9, 2, share=0.1, decay=0.999)
    state = tx.init(jnp.zeros((), "bfloat16"))
    for step in range(2000):
        _, state = tx.update(jnp.bfloat16(step == 0), state)
    np.testing.assert_allclose(state.average, 0.001 * 0.999**1999, rtol=1e-3)
