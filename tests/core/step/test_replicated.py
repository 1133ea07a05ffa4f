"""Tests one device's part of a step: its prediction and its keys."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import problems

from ...grid import grid
from ...helpers import (
    HELD,
    OPTIMIZERS,
    assert_bits_equal,
    batches,
    init_params,
    loss_fn,
)
from ...reference import pipe_sgd

DEVICES, STEPS = 4, 9


def drained(data, tx, *, loss=loss_fn, params=None, **settings):
    """Returns the parameters after a run and its drain."""
    train = pj.make_train_step(loss, tx, **settings)
    state = train.init(init_params() if params is None else params)
    for batch in data:
        state, _ = train.step(state, batch)
    return train.drain(state)[0].params


@grid(1, name=OPTIMIZERS, width=[2, 4], executor=["fused", "host"])
def test_training_on_one_device_with_prediction_is_synchronous(width, name, executor):
    """The device's own gradient is the mean, so training is synchronous."""
    run = functools.partial(
        drained, batches(STEPS), OPTIMIZERS[name], mesh=pj.data_mesh(1)
    )
    ahead = run(width=width, executor=executor)
    synchronous = run(width=1, executor=executor)
    if name != "clip+adamw":
        assert_bits_equal(ahead, synchronous)
        return
    # A norm is summed in the order of its program, and the prediction is in another
    # program: each update may differ by an ulp.
    chex.assert_trees_all_close(ahead, synchronous, rtol=0, atol=1e-6)


RULES = ["linearized", "own"]


@grid(1, width=[2, 3], name=OPTIMIZERS, warmup_steps=[0, 3], rule=RULES)
def test_predicted_training_equals_the_recursion_by_hand(
    width, name, warmup_steps, rule
):
    """Compares with the recursion without pipejax; rounding is as in `test_step`."""
    tx, data = OPTIMIZERS[name], batches(STEPS)
    got = drained(
        data,
        tx,
        mesh=pj.data_mesh(4),
        width=width,
        warmup_steps=warmup_steps,
        weight_prediction=rule,
    )
    expected = pipe_sgd(
        loss_fn,
        tx,
        init_params(),
        data,
        workers=4,
        width=width,
        warmup_steps=warmup_steps,
        drain=True,
        predict=rule if name in HELD else "own",
        held=HELD.get(name),
    )[-1]
    chex.assert_trees_all_close(got, expected, rtol=0, atol=4e-6)


@grid(1, width=[2, 3], name=HELD, rule=RULES, executor=["fused", "host"])
def test_weighted_predictions_equal_the_recursion_by_hand(width, name, rule, executor):
    """A device has a gradient of its own, whatever its weight, and none without one."""
    weights = np.random.default_rng(2).integers(1, 12, (STEPS, 4)).astype("f4")
    weights[4, 2] = 0
    data = [
        {**batch, "w": each.repeat(len(batch["x"]) // 4)}
        for batch, each in zip(batches(STEPS), weights, strict=True)
    ]

    def weighted(params, batch):
        return loss_fn(params, batch), pj.Aux(weight=batch["w"][0])

    train = pj.make_train_step(
        weighted,
        OPTIMIZERS[name],
        mesh=pj.data_mesh(4),
        width=width,
        weight_prediction=rule,
        executor=executor,
    )
    state = train.init(init_params(), batch=data[0])
    for batch in data:
        state, _ = train.step(state, batch)
    expected = pipe_sgd(
        loss_fn,
        OPTIMIZERS[name],
        init_params(),
        data,
        workers=4,
        width=width,
        drain=True,
        predict=rule,
        held=HELD[name],
        weights=weights,
    )[-1]
    got = train.drain(state)[0].params
    chex.assert_trees_all_close(got, expected, rtol=0, atol=4e-6)


@grid(0, width=[2, 3, 4], tx=[optax.sgd(0.02, momentum=0.9), optax.sgd(0.1)])
def test_quadratic_with_prediction_takes_synchronous_steps(width, tx):
    """With noise too, the mean of gradients is the gradient at the mean.

    The plain pipeline diverges at this learning rate, so the test cannot pass just
    because all results are close.
    """
    problem = problems.quadratic([1.0, 10.0], noise=1.0)
    rng = np.random.default_rng(0)
    data = [problem.batch(rng.integers(0, problem.size, 16)) for _ in range(60)]
    start = np.zeros(2, np.float32)
    run = functools.partial(
        drained, data, tx, loss=problem.loss_fn, params=start, mesh=pj.data_mesh(4)
    )
    synchronous = run(width=1)
    np.testing.assert_allclose(run(width=width), synchronous, rtol=1e-4, atol=1e-5)
    plain = run(width=width, weight_prediction=False)
    assert np.abs(plain - synchronous).max() > 0.1


@grid(0, width=[3, 2], rule=RULES)
def test_both_executors_have_the_same_bits(width, rule):
    run = functools.partial(
        drained,
        batches(STEPS),
        OPTIMIZERS["clip+adamw"],
        mesh=pj.data_mesh(4),
        width=width,
        weight_prediction=rule,
    )
    assert_bits_equal(run(executor="fused"), run(executor="host"))


def test_prediction_sends_no_more_and_keeps_replicas_equal():
    settings = dict(mesh=pj.data_mesh(4), width=2)
    ahead = pj.make_train_step(loss_fn, optax.adam(1e-2), **settings)
    plain = pj.make_train_step(
        loss_fn, optax.adam(1e-2), **settings, weight_prediction=False
    )
    state, data = ahead.init(init_params()), batches(5)
    for batch in data:
        state, _ = ahead.step(state, batch)
    assert len(set(pj.replica_digest(state).values())) == 1
    found = ahead.transfers(state, data[0])
    assert found == plain.transfers(plain.init(init_params()), data[0])


@pytest.mark.parametrize("rule", RULES)
def test_gradient_with_nan_is_not_predicted(rule):
    """A device would otherwise compute at NaN, and send NaN from then on."""
    train = pj.make_train_step(
        loss_fn,
        optax.adam(1e-2),
        mesh=pj.data_mesh(2),
        weight_prediction=rule,
    )
    state, data = train.init(init_params()), batches(8)
    data[2]["x"][0, 0] = np.nan
    skipped = []
    for batch in data:
        state, info = train.step(state, batch)
        skipped.append(int(info.skipped))
    assert skipped == [0, 0, 0, 1, 1, 1, 1, 1]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_model_state_is_predicted_with_the_parameters():
    """The state is a running mean of the input, which one device knows exactly."""

    def loss(params, batch, *, model_state):
        after = 0.9 * model_state + 0.1 * batch["x"].mean()
        return loss_fn(params, batch) + after * 0, pj.Aux(model_state=after)

    def run(**settings):
        train = pj.make_train_step(
            loss, optax.sgd(0.1), mesh=pj.data_mesh(1), **settings
        )
        state = train.init(init_params(), model_state=jnp.float32(0))
        for batch in batches(STEPS):
            state, _ = train.step(state, batch)
        return train.drain(state)[0].model_state

    ahead = run(width=3)
    np.testing.assert_allclose(ahead, run(width=1), rtol=1e-6)
