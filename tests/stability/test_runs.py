"""Tests that the real train step grows or shrinks on a quadratic as the limits say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pipejax as pj
from pipejax import stability

from ..grid import grid
from .families import FAMILIES, heavy_ball

PLAIN = {"weight_prediction": False}


@grid(1, name=FAMILIES, width=[1, 2, 3, 4])
def test_train_step_is_stable_to_the_third_digit_of_the_limit(name, width):
    """A run shrinks a thousandth below the limit, and grows a thousandth above it."""
    tx = FAMILIES[name](0.1)
    limit = stability.max_curvature(tx, width, **PLAIN)
    below, above = growth(tx, width, [0.999 * limit, 1.001 * limit])
    assert below < 0 < above


@pytest.mark.parametrize("width", [1, 2, 3])
def test_spectral_radius_equals_the_rate_of_a_run(width):
    tx = heavy_ball(0.1)
    curvature = 0.7 * stability.max_curvature(tx, width, **PLAIN)
    (rate,) = growth(tx, width, [curvature])
    # Both windows hold about ten periods, the last of which is cut off.
    expected = np.log(stability.spectral_radius(tx, width, curvature, **PLAIN))
    assert rate == pytest.approx(expected, rel=0.05)


@grid(1, name=FAMILIES, width=[2, 3, 4])
def test_deviations_of_a_train_step_are_stable_to_the_third_digit(name, width):
    """The mean over devices is constant, while the devices deviate from it."""
    tx = FAMILIES[name](0.1)
    limit = stability.max_curvature(tx, width)
    below, above = deviation_growth(tx, width, [0.999 * limit, 1.001 * limit])
    assert below < 0 < above


@pytest.mark.parametrize(("steep", "rank", "stable"), [(1, 1, 1), (2, 1, 0), (2, 2, 1)])
def test_rank_at_once_must_cover_the_steep_directions(steep, rank, stable):
    """Steep rows are beyond the limit of a plain delay, 0.1, but not that of all."""
    curvatures = jnp.where(jnp.arange(8) < steep, 3.0, 0.03)[:, None]
    codec = pj.codecs.power_sgd(rank, jax.random.key(0))
    train = pj.make_train_step(
        lambda w, x: 0.5 * jnp.sum(curvatures * w**2) + 0 * x.sum(),
        heavy_ball(1.0),
        mesh=pj.data_mesh(2),
        executor="fused",
        at_once=codec,
    )
    state = train.init(jax.random.normal(jax.random.key(1), (8, 8)))
    start = jnp.linalg.norm(state.params[:steep])
    for _ in range(60):
        state, _ = train.step(state, jnp.zeros(2))
    assert (jnp.linalg.norm(state.params[:steep]) < start / 2) == stable


def deviation_growth(tx, width, curvatures, steps=4000):
    """Returns the growth of one device's gradient, pushed off the mean at first."""

    def loss_fn(w, batch):
        curvature, push = batch
        return jnp.mean(0.5 * curvature * w**2 - push * w)

    train = pj.make_train_step(
        loss_fn,
        tx,
        mesh=pj.data_mesh(2),
        width=width,
        executor="fused",
        weight_prediction="own",
    )
    pushes = jnp.zeros((steps, 2)).at[0].set(jnp.array([1.0, -1.0]))

    @jax.jit
    def run(curvature):
        def step(state, push):
            state, _ = train.step(state, (jnp.full(2, curvature), push))
            return state, (state.params, state.in_flight.pending[-1].gradients[0])

        return lax.scan(step, train.init(jnp.float32(0)), pushes)[1]

    rates = []
    for curvature in curvatures:
        params, own = (np.asarray(x, np.float64) for x in run(curvature))
        assert not params.any()
        size = np.sqrt(np.mean(own.reshape(4, -1) ** 2, axis=1))
        rates.append(np.log(size[3] / size[1]))
    return rates


def growth(tx, width, curvatures):
    """Returns the growth of the parameter's logarithm in a step, at each curvature.

    The growth is taken between the root mean squares of the second and the last quarter
    of a run. The run is short, or long if the parameter hardly changes in a short one.
    At other curvatures, the parameter would underflow in a long run.
    """

    def loss_fn(w, batch):
        return 0.5 * jnp.mean(batch) * w**2

    train = pj.make_train_step(
        loss_fn,
        tx,
        mesh=pj.data_mesh(1),
        width=width,
        weight_prediction=False,
        executor="fused",
    )

    @functools.partial(jax.jit, static_argnums=1)
    def run(curvature, steps):
        def step(state, _):
            return train.step(state, curvature[None])[0], state.params

        return lax.scan(step, train.init(jnp.float32(1)), length=steps)[1]

    rates = []
    for curvature in curvatures:
        for steps in (400, 20_000):
            path = np.asarray(run(jnp.float32(curvature), steps), np.float64)
            size = np.sqrt(np.mean(path.reshape(4, -1) ** 2, axis=1))
            change = np.log(size[3] / size[1])
            if abs(change) > 1:
                break
        rates.append(change / (steps / 2))
    return rates
