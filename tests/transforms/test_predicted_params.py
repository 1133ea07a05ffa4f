"""Tests the prediction in a user's own loop."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj

from ..grid import grid
from .flax_loop import STEPS, Loop, chained, expected, init_params


def test_two_gradients_in_flight_are_applied_in_turn():
    """Momentum by hand: `m <- 0.5 m + g`, `w <- w - 0.1 m`, with the oldest first."""
    inner = optax.sgd(0.1, momentum=0.5)
    tx, params = pj.pipelined(inner, "data", width=3), {"w": jnp.array([1.0, 2.0])}
    state = tx.init(params)
    old, new = np.float32([1, -1]), np.float32([3, 5])
    pending = [
        message._replace(gradients={"w": jnp.asarray(gradient)})
        for message, gradient in zip(state.in_flight.pending, (old, new), strict=True)
    ]

    def ahead(filled):
        in_flight = state.in_flight._replace(
            pending=tuple(pending), filled=jnp.array([filled])
        )
        found = pj.predicted_params(inner, state._replace(in_flight=in_flight), params)
        return np.asarray(found["w"])

    w = np.float32([1, 2])
    np.testing.assert_array_equal(ahead(0), w)  # neither gradient is real
    np.testing.assert_allclose(ahead(1), w - 0.1 * new, rtol=1e-6)
    both = w - 0.1 * old - 0.1 * (0.5 * old + new)
    np.testing.assert_allclose(ahead(2), both, rtol=1e-6)


@grid(
    1,
    inner=[optax.sgd(0.05, momentum=0.9), optax.sgd(0.1)],
    width=[3, 2, 1],
    check_vma=[False, True],
)
def test_predicted_gradients_equal_make_train_step(inner, width, check_vma):
    loop = Loop(chained(width, inner), check_vma=check_vma, ahead=inner)
    states = loop.run(width)
    wanted = expected(width, inner, weight_prediction=True)
    # After the steps, zero gradients would move momentum.
    got = [s.params for s in states[:STEPS]]
    chex.assert_trees_all_close(got, wanted[:STEPS], rtol=0, atol=1e-6)


def test_masked_optimizer_is_predicted_after_its_first_gradient():
    """Optax's mask holds the optimizer at the start, as without prediction."""
    width, adamw = 3, optax.adamw(1e-2)
    inner = optax.conditionally_mask(adamw, lambda step: step >= width - 1)
    states = Loop(chained(width, inner), ahead=inner).run(width)
    wanted = expected(width, adamw, weight_prediction="own")
    got = [s.params for s in states[:STEPS]]
    chex.assert_trees_all_close(got, wanted[:STEPS], rtol=0, atol=1e-5)


def test_chain_of_several_optimizers_is_predicted_as_one():
    parts = (optax.clip_by_global_norm(0.3), optax.sgd(0.1))
    tx = optax.chain(pj.pipelined_mean("data", width=2), *parts)
    states = Loop(tx, ahead=optax.chain(*parts)).run(2)
    wanted = expected(2, optax.chain(*parts), weight_prediction="own")
    got = [s.params for s in states[:STEPS]]
    chex.assert_trees_all_close(got, wanted[:STEPS], rtol=0, atol=1e-6)


def test_prediction_refuses_a_state_without_a_pipeline():
    tx = optax.sgd(0.1)
    with pytest.raises(
        ValueError, match=r"`opt_state` must be the state of pj\.pipelined"
    ):
        pj.predicted_params(tx, tx.init(init_params()), init_params())


def test_nan_of_one_device_enters_no_other_gradient():
    """An optimizer that skips NaN has one update less, as without a prediction."""
    tx = optax.apply_if_finite(optax.adam(0.1), 5)
    pipelined = pj.pipelined(tx, "data")
    mesh, along = pj.data_mesh(2), P("data")

    def create(w):
        return w, pipelined.init(w)

    def step(state, x):
        w, opt_state = state
        ahead = pj.predicted_params(tx, opt_state, w)
        grad = jax.grad(lambda w: jnp.mean((w[None] - x) ** 2))(ahead)
        updates, opt_state = pipelined.update(grad, opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), jnp.isnan(grad).any()[None]

    specs = pj.state_specs(jax.eval_shape(create, jnp.zeros(3)), "data")
    on = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    state = jax.jit(on(create, in_specs=P(), out_specs=specs))(jnp.zeros(3))
    run = jax.jit(on(step, in_specs=(specs, along), out_specs=(specs, along)))
    bad = []
    for number in range(40):
        x = jnp.ones((2, 3))
        state, nan = run(state, x.at[0].set(jnp.nan) if number == 5 else x)
        bad.append(nan.tolist())
    assert [number for number, each in enumerate(bad) if any(each)] == [5]
    np.testing.assert_allclose(state[0], 1, atol=0.2)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (optax.sgd(0.1, momentum=0.9), optax.sgd(0.1)),
        (optax.sgd(0.1), optax.adam(0.1)),
        (optax.adam(0.1), pj.pipelined(optax.adam(0.1), "data")),
    ],
    ids=["without momentum", "adam", "pipelined"],
)
def test_state_of_another_optimizer_is_refused(given, asked):
    params = {"w": jnp.zeros(3)}

    def ahead(_):
        state = pj.pipelined(given, "data").init(params)
        return pj.predicted_params(asked, state, params)

    with pytest.raises(ValueError, match="`opt_state` must hold a state of `tx`"):
        jax.vmap(ahead, axis_name="data")(jnp.zeros(2))
