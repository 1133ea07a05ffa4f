"""Limits of stability: closed forms, and the real train step on a quadratic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import pipejax as pj
from pipejax import stability

# Of a plain delay.
max_curvature, max_learning_rate, spectral_radius = (
    functools.partial(limit, weight_prediction=False)
    for limit in (
        stability.max_curvature,
        stability.max_learning_rate,
        stability.spectral_radius,
    )
)

sgd = optax.sgd
heavy_ball = functools.partial(optax.sgd, momentum=0.9)
gentle = functools.partial(optax.sgd, momentum=0.5)
nesterov = functools.partial(optax.sgd, momentum=0.9, nesterov=True)


def averaged(rate):
    return optax.chain(optax.ema(0.9, debias=True), optax.scale(-rate))


def decayed(rate):
    return optax.chain(optax.add_decayed_weights(0.5), optax.sgd(rate))


FAMILIES = {
    "sgd": sgd,
    "momentum 0.5": gentle,
    "momentum 0.9": heavy_ball,
    "nesterov": nesterov,
    "average": averaged,
}


@pytest.mark.parametrize("width", range(1, 9))
def test_sgd_has_a_closed_form(width):
    # z^(K-1) (z - 1) = -x on the circle: roots leave it at the angle pi / (2 K - 1).
    expected = 2 * np.sin(np.pi / (4 * width - 2))
    assert max_learning_rate(sgd, width) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
def test_heavy_ball_has_closed_forms(momentum):
    family = functools.partial(optax.sgd, momentum=momentum)
    assert max_learning_rate(family, 1) == pytest.approx(2 * (1 + momentum), rel=1e-6)
    assert max_learning_rate(family, 2) == pytest.approx(1 - momentum, rel=1e-6)


def test_nesterov_has_a_closed_form():
    # At z = -1: 2 (1 + mu) = x (1 + 2 mu).
    expected = 2 * 1.9 / 2.8
    assert max_learning_rate(nesterov, 1) == pytest.approx(expected, rel=1e-6)
    assert max_learning_rate(nesterov, 2) == pytest.approx(0.253, rel=2e-3)


def test_curvature_and_learning_rate_trade_one_to_one():
    assert max_learning_rate(heavy_ball, 2, curvature=20.0) == pytest.approx(0.005)
    assert max_curvature(heavy_ball(0.005), 2) == pytest.approx(20.0, rel=1e-5)


def test_weight_decay_is_curvature():
    # w - eta (g + 0.5 w) is stable up to eta (lambda + 0.5) = 2.
    assert max_curvature(decayed(0.1), 1) == pytest.approx(19.5)


def test_no_step_is_always_stable():
    assert max_curvature(optax.sgd(0.0), 2) == np.inf


def test_a_step_uphill_never_is():
    assert max_curvature(optax.sgd(-0.1), 2) == 0.0


@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_radius_is_one_at_the_limit(name, width, predicts):
    tx, how = FAMILIES[name](1.0), {"weight_prediction": predicts}
    limit = stability.max_curvature(tx, width, **how)
    below, at, above = (
        stability.spectral_radius(tx, width, factor * limit, **how)
        for factor in (0.99, 1.0, 1.01)
    )
    assert below < 1 < above
    assert at == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_train_step_is_stable_to_the_third_digit(name, width):
    """A thousandth below the limit a real run shrinks, a thousandth above it grows."""
    tx = FAMILIES[name](0.1)
    limit = max_curvature(tx, width)
    below, above = growth(tx, width, [0.999 * limit, 1.001 * limit])
    assert below < 0 < above


@pytest.mark.parametrize("width", [1, 2, 3])
def test_radius_is_the_rate_of_a_run(width):
    tx = heavy_ball(0.1)
    curvature = 0.7 * max_curvature(tx, width)
    (rate,) = growth(tx, width, [curvature])
    # Both windows hold some ten periods, of which a part is cut off.
    expected = np.log(spectral_radius(tx, width, curvature))
    assert rate == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("width", range(2, 9))
def test_predicted_sgd_has_a_closed_form(width):
    # z^(K-1) + x (z^(K-2) + ... + 1): at x = 1 its roots are roots of unity.
    limit = stability.max_learning_rate(sgd, width)
    assert limit == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
def test_predicted_heavy_ball_has_closed_forms(momentum):
    family = functools.partial(optax.sgd, momentum=momentum)
    at_2, at_3 = (stability.max_learning_rate(family, width) for width in (2, 3))
    assert at_2 == pytest.approx(1, rel=1e-6)
    assert at_3 == pytest.approx(1 / (1 + momentum), rel=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.8])
def test_feedback_has_a_closed_form(share):
    # z^2 + x z + c x: a root at -1, or two on the circle.
    limit = stability.max_learning_rate(heavy_ball, 2, deviation_feedback=share)
    assert limit == pytest.approx(min(1 / (1 - share), 1 / (share or 1)), rel=1e-6)


def test_a_step_uphill_at_first_drifts_apart_to_one_side():
    # z - 1.7 x: it leaves the circle at z = 1.
    taps = (-1.7, 2.43, -0.729)

    def respond(gradient, state, params=None):
        past = (gradient, *state[:2])
        return -sum(a * b for a, b in zip(taps, past, strict=True)), past

    tx = optax.GradientTransformation(lambda w: (w, w, w), respond)
    limit = stability.max_curvature(tx, 2)
    assert 0 < limit == pytest.approx(1 / 1.7)
    assert stability.spectral_radius(tx, 2, 1.01 * limit) > 1


@pytest.mark.parametrize("name", FAMILIES)
def test_without_a_delay_there_is_nothing_to_predict(name):
    tx = FAMILIES[name](0.1)
    assert stability.max_curvature(tx, 1) == max_curvature(tx, 1)


def test_the_mean_may_be_what_is_unstable():
    """Of eight gradients' average the newest, which deviates, is but an eighth."""
    tx = optax.chain(pj.corrections.average_gradients(8), optax.sgd(1.0))
    assert stability.max_curvature(tx, 2) == stability.max_curvature(tx, 1)


@pytest.mark.parametrize("feedback", [0.0, 0.3])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_deviations_of_a_train_step_are_stable_to_the_third_digit(
    name, width, feedback
):
    """The mean of all devices stands still, and each goes its own way about it."""
    tx, how = FAMILIES[name](0.1), {"deviation_feedback": feedback}
    limit = stability.max_curvature(tx, width, **how)
    below, above = (
        deviation_growth(tx, width, x * limit, **how) for x in (0.999, 1.001)
    )
    assert below < 0 < above


def deviation_growth(tx, width, curvature, steps=4000, **how):
    """As `growth`, of one device's gradient, pushed off the mean by the first batch."""

    def loss_fn(w, batch):
        return jnp.mean(0.5 * curvature * w**2 - batch * w)

    train = pj.make_train_step(
        loss_fn, tx, mesh=pj.data_mesh(2), width=width, executor="fused", **how
    )
    pushes = jnp.zeros((steps, 2)).at[0].set(jnp.array([1.0, -1.0]))

    @jax.jit
    def run(pushes):
        def step(state, push):
            state, _ = train.step(state, push)
            return state, (state.params, state.in_flight.pending[-1]["float32"][0])

        return lax.scan(step, train.init(jnp.float32(0)), pushes)[1]

    params, own = (np.asarray(x, np.float64) for x in run(pushes))
    assert not params.any()
    size = np.sqrt(np.mean(own.reshape(4, -1) ** 2, axis=1))
    return np.log(size[3] / size[1])


def growth(tx, width, curvatures):
    """Logarithm of what a step multiplies the parameter by, at each curvature.

    By the root mean square of the second and the last quarter of a run: a short one, or
    if that hardly changes anything a long one, in which others would underflow.
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


@pytest.mark.parametrize("tx", [optax.adam(1e-3), optax.sign_sgd(0.1)])
def test_what_is_not_linear_is_refused(tx):
    with pytest.raises(ValueError, match="must be linear in its gradients"):
        max_curvature(tx, 2)


def test_what_is_not_proportional_is_refused():
    with pytest.raises(ValueError, match="proportional to its learning rate"):
        max_learning_rate(lambda rate: optax.sgd(0.1 + rate), 2)


@pytest.mark.parametrize("curvature", [0.0, -1.0, float("nan")])
def test_curvature_must_be_above_zero(curvature):
    with pytest.raises(ValueError, match="`curvature` must be a number above 0"):
        max_learning_rate(sgd, 2, curvature=curvature)


@pytest.mark.parametrize("curvature", [-1.0, float("nan")])
def test_curvature_must_not_be_negative(curvature):
    with pytest.raises(ValueError, match="`curvature` must be a number of at least 0"):
        spectral_radius(optax.sgd(0.1), 2, curvature)


def test_width_must_be_one_or_more():
    with pytest.raises(ValueError, match="`width` must be an integer of at least 1"):
        max_curvature(optax.sgd(0.1), 0)


def test_picture_draws_a_line_a_width():
    pytest.importorskip("matplotlib")
    families = {
        "heavy-ball": lambda rate, momentum, width: optax.sgd(rate, momentum),
        "Nesterov": lambda rate, momentum, width: optax.sgd(rate, momentum, True),
    }
    figure = pj.stability.picture(families, widths=(1, 2))
    assert [len(axes.lines) for axes in figure.axes] == [2, 2]
    heavy = figure.axes[0].lines[1]
    np.testing.assert_allclose(heavy.get_ydata(), 1 - heavy.get_xdata(), rtol=1e-4)
