"""Tests the largest eigenvalue of a Hessian against known or explicit Hessians."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import pipejax as pj
from pipejax.stability import sharpness


def bowl(params, curvatures):
    return jnp.sum(curvatures * params**2) / 2


def net_loss(params, x, y):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


@pytest.fixture
def net():
    rng = np.random.default_rng(0)
    params = {"w1": rng.normal(size=(5, 7)), "b1": rng.normal(size=(1, 7))}
    params["w2"] = rng.normal(size=(7, 2))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    x, y = rng.normal(size=(64, 5)), rng.normal(size=(64, 2))
    return params, jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def formed(params, x, y):
    flat, unravel = ravel_pytree(params)
    return jax.jit(jax.hessian(lambda v: net_loss(unravel(v), x, y)))(flat)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_sharpness_of_a_quadratic_is_its_largest_curvature(size):
    curvatures = jnp.arange(1.0, size + 1)
    found = sharpness(bowl, jnp.ones(size), curvatures, rtol=1e-5)
    assert found == pytest.approx(size, rel=1e-5)


def test_sharpness_of_a_network_is_the_top_eigenvalue_of_its_hessian(net):
    largest = np.linalg.eigvalsh(formed(*net)).max()
    assert sharpness(net_loss, *net, rtol=1e-5) == pytest.approx(largest, rel=1e-4)


def test_preconditioner_gives_the_sharpness_in_scaled_coordinates(net):
    params, x, y = net
    preconditioner = jax.tree.map(lambda w: 0.1 + jnp.abs(w), params)
    scale = np.asarray(ravel_pytree(preconditioner)[0]) ** -0.5
    expected = np.linalg.eigvalsh(np.outer(scale, scale) * formed(*net)).max()
    found = sharpness(net_loss, params, x, y, preconditioner=preconditioner, rtol=1e-5)
    assert found == pytest.approx(expected, rel=1e-4)


def test_negative_curvature_counts_only_without_positive_curvature():
    assert sharpness(bowl, jnp.ones(3), -jnp.array([1.0, 2.0, 3.0])) == pytest.approx(
        -1, rel=1e-2
    )
    assert sharpness(bowl, jnp.ones(3), jnp.array([1.0, 2.0, -9.0])) == pytest.approx(
        2, rel=1e-2
    )


@pytest.mark.parametrize("size", [1, 2, 50])
def test_straight_line_has_no_sharpness(size):
    assert sharpness(lambda params: jnp.sum(params), jnp.ones(size)) == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_sharpness_accepts_parameters_of_any_precision(dtype):
    params = {"a": jnp.ones(4, dtype), "b": jnp.ones((), jnp.float32)}

    def loss(params):
        return 4 * jnp.sum(params["a"].astype(jnp.float32) ** 2) + params["b"] ** 2

    assert sharpness(loss, params) == pytest.approx(8, rel=1e-2)


@pytest.mark.parametrize(("share", "stable"), [(0.9, True), (1.1, False)])
def test_train_step_diverges_beyond_the_limit(share, stable):
    tx, start = optax.sgd(0.1, momentum=0.9), jnp.ones(3)
    limit = pj.stability.max_curvature(tx, 2, weight_prediction=False)
    curvatures = share * limit * jnp.array([0.1, 0.5, 1.0])
    assert (sharpness(bowl, start, curvatures) < limit) == stable
    step = pj.make_train_step(
        lambda params, batch: bowl(params, curvatures) + 0 * batch.sum(),
        tx,
        mesh=pj.data_mesh(1),
        weight_prediction=False,
    )
    state = step.init(start)
    for _ in range(300):
        state, _ = step.step(state, jnp.zeros(1))
    assert (bowl(state.params, curvatures) < bowl(start, curvatures)) == stable


def test_loss_is_compiled_once(net):
    params, x, y = net
    traces = []

    def counted(*args):
        traces.append(1)
        return net_loss(*args)

    sharpness(counted, params, x, y)
    first = len(traces)
    sharpness(counted, params, 2 * x, y)
    assert len(traces) == first


@pytest.mark.parametrize(
    "wrong", [{"w1": jnp.ones((5, 7))}, jnp.ones(3), {"w1": 1, "b1": 1, "w2": 1}]
)
def test_preconditioner_of_another_form_is_refused(net, wrong):
    with pytest.raises(ValueError, match="`preconditioner` must be like `params`"):
        sharpness(net_loss, *net, preconditioner=wrong)


@pytest.mark.parametrize("least", [0.0, -1.0, float("nan")])
def test_preconditioner_must_be_above_zero(net, least):
    params, x, y = net
    right = jax.tree.map(jnp.ones_like, params)
    for name in right:
        wrong = right | {name: right[name].at[0, 1].set(least)}
        with pytest.raises(ValueError, match="must be above 0 everywhere"):
            sharpness(net_loss, params, x, y, preconditioner=wrong)


def test_preconditioner_may_be_of_integers():
    divided = jnp.full(3, 2, jnp.int32)
    found = sharpness(bowl, jnp.ones(3), jnp.ones(3), preconditioner=divided)
    assert found == pytest.approx(0.5)


def test_sharpness_at_integers_is_refused():
    with pytest.raises(ValueError, match=r"`params` must be floating .*dtype int32"):
        sharpness(bowl, jnp.arange(3), jnp.ones(3))


@pytest.mark.parametrize("rtol", [0.0, -1.0, 1.0, float("nan"), "a"])
def test_tolerance_must_be_between_0_and_1(rtol):
    with pytest.raises(ValueError, match=r"`rtol` must lie in \(0, 1\)"):
        sharpness(bowl, jnp.ones(3), jnp.ones(3), rtol=rtol)


def test_nan_in_second_derivatives_is_refused():
    with pytest.raises(ValueError, match="must have finite second derivatives"):
        sharpness(bowl, jnp.ones(3), jnp.array([1.0, jnp.nan, 1.0]))
