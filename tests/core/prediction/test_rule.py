"""Tests the rules of prediction against formulas by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pipejax._core.prediction import CODE, Mean, Own, anchored, kind_of, predicted
from pipejax._internal.finite import sum_of_squares_on_one_device

from ...grid import grid

W = {"w": jnp.float32([1.0, -2.0, 3.0]), "b": jnp.float32([[0.5]])}
M = {"w": jnp.float32([0.1, -0.2, 0.05]), "b": jnp.float32([[0.3]])}
G = {"w": jnp.float32([0.3, 0.1, -0.2]), "b": jnp.float32([[-0.1]])}
YES, NO, ZERO = jnp.array(True), jnp.array(False), jnp.float32(0)


def updating(tx):
    return lambda g, s, w, loss: tx.update(g, s, w)


def kind(tx, count=1):
    return kind_of(updating(tx), W, jax.eval_shape(tx.init, W), count)


def own(gradients=G, *, valid=YES, usable=YES):
    return Own.of(gradients, ZERO, valid, usable)


def ahead(tx, state, *, known=YES, mean=M, in_flight=None):
    """Returns a prediction, from one gradient in flight unless others are given."""
    given = kind(tx, len(in_flight or [0])), updating(tx)
    compiled = jax.jit(functools.partial(predicted, *given))
    return compiled(W, state, Mean(mean, ZERO, known), in_flight or [own()])


KINDS = {
    "sgd": (optax.sgd(0.1), "linear"),
    "nesterov": (optax.sgd(0.1, momentum=0.9, nesterov=True), "linear"),
    "decay": (optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)), "linear"),
    "steps": (optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), "linear"),
    "clip": (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1)), "elementwise"),
    "adamw": (optax.adamw(0.1), "elementwise"),
    "lion": (optax.lion(0.1), "elementwise"),
    "lamb": (optax.lamb(0.1), "elementwise"),
    "muon": (optax.contrib.muon(0.1), "mixing"),
}


@grid(1, count=[1, 2], name=KINDS)
def test_kind_of_an_optimizer_is_found(name, count):
    tx, wanted = KINDS[name]
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(2)}
    state = jax.eval_shape(tx.init, params)
    assert kind_of(updating(tx), params, state, count).name == wanted


def test_slopes_of_momentum_are_constant_and_of_adam_are_not():
    momentum, adam = kind(optax.sgd(0.1, momentum=0.9)), kind(optax.adam(0.1))
    assert not momentum.params
    assert not any(jax.tree.leaves(momentum.opt_state))
    assert adam.opt_state[0].nu == {"w": True, "b": True}
    assert kind(optax.lamb(0.1)).params


def adam_by_hand(g, m, v, t, eps, rate=0.1, b1=0.9, b2=0.999):
    """Returns the update of Adam, and its derivative by the gradient."""
    mu, nu = (1 - b1) * g + b1 * m, (1 - b2) * g * g + b2 * v
    mu, nu = mu / (1 - b1**t), nu / (1 - b2**t)
    root = np.sqrt(nu)
    inner = (1 - b1) / (1 - b1**t) / (root + eps)
    inner -= mu / (root + eps) ** 2 * (1 - b2) / (1 - b2**t) * g / root
    return -rate * mu / (root + eps), -rate * inner


@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_prediction_for_adam_equals_results_by_hand(eps):
    """v = w + U(m) + P (g - m), after one update by m."""
    tx = optax.adam(0.1, eps=eps)
    _, state = tx.update(M, tx.init(W), W)
    found = ahead(tx, state)
    for name in W:
        w, m, g = (np.float64(x[name]) for x in (W, M, G))
        update, slope = adam_by_hand(m, 0.1 * m, 0.001 * m * m, 2, eps)
        np.testing.assert_allclose(found[name], w + update + slope * (g - m), rtol=1e-5)


def test_norm_is_held_at_the_mean():
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5))
    found = ahead(tx, tx.init(W))
    length = np.sqrt(sum(np.sum(np.square(x)) for x in M.values()))
    for name in W:
        wanted = W[name] - 0.5 * 0.1 / length * G[name]
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6)


def test_first_prediction_follows_the_own_gradient():
    tx = optax.adamw(0.1)
    found = ahead(tx, tx.init(W), known=NO, mean=jax.tree.map(jnp.zeros_like, M))
    updates, _ = tx.update(G, tx.init(W), W)
    for name, x in optax.apply_updates(W, updates).items():
        np.testing.assert_allclose(found[name], x, rtol=1e-6)


def test_prediction_without_gradients_in_flight_is_the_parameters():
    tx = optax.adamw(0.1)
    for known in (YES, NO):
        found = ahead(tx, tx.init(W), known=known, in_flight=[own(valid=NO)])
        jax.tree.map(np.testing.assert_array_equal, found, W)


@pytest.mark.parametrize("known", [True, False])
def test_unusable_gradient_counts_as_zero(known):
    """It counts as zero, and before any mean nothing is predicted."""
    tx = optax.chain(optax.clip_by_global_norm(1e9), optax.sgd(0.5))
    bad = jax.tree.map(jnp.zeros_like, G)
    found = ahead(
        tx, tx.init(W), known=jnp.array(known), in_flight=[own(bad, usable=NO)]
    )
    # U(m) + P (0 - m) is U(0) here.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, W)


def test_muon_is_predicted_halfway_to_the_own_gradient():
    tx = optax.contrib.muon(0.1)
    params = {"w": jnp.float32([[1.0, 2.0], [3.0, 5.0]])}
    m, g = {"w": jnp.float32([[0.1, -0.2], [0.3, 0.4]])}, {"w": jnp.ones((2, 2))}
    state, update = tx.init(params), updating(tx)
    found_kind = kind_of(update, params, jax.eval_shape(tx.init, params), 1)
    found = predicted(found_kind, update, params, state, Mean(m, ZERO, YES), [own(g)])
    blend = {"w": m["w"] + 0.5 * (g["w"] - m["w"])}
    updates, _ = tx.update(blend, state, params)
    np.testing.assert_allclose(found["w"], params["w"] + updates["w"], rtol=1e-5)


HARD = {
    "no second moment, no eps": (optax.adam(0.1, eps=0.0), M | {"b": 0 * M["b"]}),
    "a gradient of zero": (optax.contrib.normalize(), jax.tree.map(jnp.zeros_like, M)),
    "a second moment close to zero": (optax.adam(0.1), M | {"w": M["w"] * 1e-30}),
}


@pytest.mark.parametrize("name", HARD)
def test_predictions_are_finite_and_bounded(name):
    tx, mean = HARD[name]
    tx = optax.chain(tx, optax.identity())
    found = ahead(tx, tx.init(W), mean=mean)
    for key, x in found.items():
        assert np.isfinite(x).all()
        assert np.abs(x - W[key]).max() < 100


def test_parameter_of_minus_infinity_stays():
    tx = optax.adamw(0.1, weight_decay=0.1)
    params = W | {"w": W["w"].at[1].set(-jnp.inf)}
    given = kind(tx), updating(tx), params, tx.init(params), Mean(M, ZERO, YES)
    found = predicted(*given, [own()])
    assert found["w"][1] == -np.inf
    assert np.isfinite(found["w"][::2]).all()


def test_slope_is_at_most_ten_times_the_slope_of_its_array():
    """Adam's slope at the small second moment would be a million times the others."""
    tx = optax.adam(0.1)
    _, state = tx.update(M, tx.init(W), W)
    mu, nu = state[0].mu, state[0].nu
    mu = mu | {"w": mu["w"].at[2].set(0.0)}
    nu = nu | {"w": nu["w"].at[2].set(1e-18)}
    state = (state[0]._replace(mu=mu, nu=nu), *state[1:])
    mean = M | {"w": M["w"].at[2].set(0.0)}
    far = G | {"w": G["w"].at[2].set(1.0)}
    without, found = (
        ahead(tx, state, mean=mean, in_flight=[own(x)])["w"]
        for x in (G | {"w": G["w"].at[2].set(0.0)}, far)
    )
    updates, _ = tx.update(mean, state, W)
    most = 10 * np.linalg.norm(updates["w"]) / np.linalg.norm(mean["w"])
    np.testing.assert_allclose(abs(found[2] - without[2]), most, rtol=1e-5)


def test_prediction_keeps_no_intermediate_results():
    """On CPUs, XLA would write six arrays of the model's size without a barrier."""
    tx, params = optax.adamw(0.1), {"w": jnp.ones((300, 400))}
    given = (
        kind_of(updating(tx), params, jax.eval_shape(tx.init, params), 1),
        updating(tx),
    )
    run = functools.partial(predicted, *given, squares=sum_of_squares_on_one_device)
    args = params, tx.init(params), Mean(params, ZERO, YES), [own(params)]
    cost = jax.jit(run).lower(*args).compile().cost_analysis()
    # Parameters, both moments, m and the own gradient are read, and the prediction is
    # written. The bounds read all but the own gradient before, and m twice.
    assert cost["bytes accessed"] < 11.5 * params["w"].nbytes


@pytest.mark.parametrize("count", [1, 2])
def test_shared_and_own_part_add_up_to_the_prediction(count):
    """c + P g with slopes as they are; c alone is made with slopes of 8 bits."""
    tx = optax.adamw(0.1)
    _, state = tx.update(M, tx.init(W), W)
    mean, queue = Mean(M, ZERO, YES), [own(), own(M)][:count]
    wanted = predicted(kind(tx, count), updating(tx), W, state, mean, queue)
    given = kind(tx, count), updating(tx), W, state, mean, [YES] * count
    c, slopes = anchored(*given, jnp.float32)
    for each, slope in zip(queue, slopes.decoded(), strict=True):
        c = jax.tree.map(lambda c, p, g: c + p * g, c, slope, each.gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), c, wanted)
    coarse, codes = anchored(*given, CODE)
    assert codes.codes[0]["w"].dtype == CODE
    # Where the own gradient is m, the error of slopes in 8 bits cancels.
    for slope in codes.decoded():
        coarse = jax.tree.map(lambda c, p, m: c + p * m, coarse, slope, M)
    at_m = predicted(
        kind(tx, count), updating(tx), W, state, mean, [own(M), own(M)][:count]
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), coarse, at_m)
