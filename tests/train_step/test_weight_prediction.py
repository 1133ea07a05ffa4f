"""Gradients taken where a device's own gradients in flight would lead."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import problems

from ..grid import grid
from ..helpers import OPTIMIZERS, assert_bits_equal, batches, init_params, loss_fn
from ..reference import pipe_sgd

STEPS = 9


def drained(data, tx, *, loss=loss_fn, params=None, **settings):
    """Parameters after a run and its drain."""
    train = pj.make_train_step(loss, tx, **settings)
    state = train.init(init_params() if params is None else params)
    for batch in data:
        state, _ = train.step(state, batch)
    return train.drain(state)[0].params


@grid(1, name=OPTIMIZERS, width=[2, 4], executor=["fused", "host"])
def test_one_device_predicts_what_comes(width, name, executor):
    """Its own gradient is the mean: pipelined training is synchronous training."""
    run = functools.partial(
        drained, batches(STEPS), OPTIMIZERS[name], mesh=pj.data_mesh(1)
    )
    ahead = run(width=width, executor=executor)
    synchronous = run(width=1, executor=executor)
    if name != "clip+adamw":
        assert_bits_equal(ahead, synchronous)
        return
    # A norm is summed in the order of the program it is part of, and the prediction is
    # part of another one: an ulp in each update.
    chex.assert_trees_all_close(ahead, synchronous, rtol=0, atol=1e-6)


@grid(width=[2, 3], name=OPTIMIZERS, warmup_steps=[0, 3], feedback=[0.0, 0.5])
def test_recursion(width, name, warmup_steps, feedback):
    """As written down without this library; rounding as in `test_exactness`."""
    tx, data = OPTIMIZERS[name], batches(STEPS)
    got = drained(
        data,
        tx,
        mesh=pj.data_mesh(4),
        width=width,
        warmup_steps=warmup_steps,
        deviation_feedback=feedback,
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
        predict=True,
        feedback=feedback,
    )[-1]
    chex.assert_trees_all_close(got, expected, rtol=0, atol=4e-6)


@grid(1, width=[2, 3, 4], tx=[optax.sgd(0.02, momentum=0.9), optax.sgd(0.1)])
def test_on_a_quadratic_it_takes_synchronous_steps(width, tx):
    """Noise and all: the mean of gradients is the gradient at the mean.

    A learning rate at which the plain pipeline diverges, so that it does not pass by
    being close to everything.
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


@grid(1, width=[3, 2], feedback=[0.5, 0.0])
def test_executors_agree_to_the_bit(width, feedback):
    run = functools.partial(
        drained,
        batches(STEPS),
        OPTIMIZERS["clip+adamw"],
        mesh=pj.data_mesh(4),
        width=width,
        deviation_feedback=feedback,
    )
    assert_bits_equal(run(executor="fused"), run(executor="host"))


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_deviations_sum_to_nothing_and_end_with_the_drain(executor):
    train = pj.make_train_step(
        loss_fn,
        optax.adam(1e-2),
        mesh=pj.data_mesh(4),
        deviation_feedback=0.5,
        executor=executor,
    )
    state, kept = train.init(init_params()), []
    for batch in batches(4):
        state, _ = train.step(state, batch)
        kept.append(by_device(state.in_flight.deviation))
    assert not kept[0].any()  # nothing had arrived
    for own in kept[1:]:
        assert np.abs(own).max() > 1e-3
        np.testing.assert_allclose(own.sum(axis=0), 0, atol=1e-6)
    assert not by_device(train.drain(state)[0].in_flight.deviation).any()


def by_device(gradients):
    """Gradients as one vector for each of four devices."""
    rows = [np.asarray(leaf).reshape(4, -1) for leaf in jax.tree.leaves(gradients)]
    return np.concatenate(rows, axis=1)


def test_only_feedback_keeps_a_deviation():
    for width, feedback in ((1, 0.5), (2, 0.0)):
        train = pj.make_train_step(
            loss_fn,
            optax.sgd(0.1),
            mesh=pj.data_mesh(2),
            width=width,
            deviation_feedback=feedback,
        )
        assert train.init(init_params()).in_flight.deviation is None


def test_replicas_stay_the_same_and_sends_no_more():
    settings = dict(mesh=pj.data_mesh(4), width=2)
    ahead = pj.make_train_step(loss_fn, optax.adam(1e-2), **settings)
    plain = pj.make_train_step(
        loss_fn, optax.adam(1e-2), **settings, weight_prediction=False
    )
    state, data = ahead.init(init_params()), batches(5)
    for batch in data:
        state, _ = ahead.step(state, batch)
    assert len(set(pj.replica_digest(state).values())) == 1
    assert ahead.transfers(state, data[0]) == plain.transfers(state, data[0])


@pytest.mark.parametrize("feedback", [0.0, 0.5])
def test_a_gradient_that_is_not_finite_is_not_followed(feedback):
    """Else a device would compute at NaN, and what it sends would be NaN for ever."""
    train = pj.make_train_step(
        loss_fn, optax.adam(1e-2), mesh=pj.data_mesh(2), deviation_feedback=feedback
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
    """A running mean of what goes in; one device knows it to the bit."""

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


@pytest.mark.parametrize("value", ["own", 1, None])
def test_weight_prediction_is_yes_or_no(value):
    with pytest.raises(ValueError, match="`weight_prediction` must be True or False"):
        pj.make_train_step(
            loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(1), weight_prediction=value
        )


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan"), "half", True, None])
def test_feedback_is_a_share(value):
    with pytest.raises(ValueError, match="`deviation_feedback` must be a number from"):
        pj.make_train_step(
            loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(1), deviation_feedback=value
        )


def test_feedback_needs_a_prediction():
    with pytest.raises(ValueError, match="must be 0 with weight_prediction=False"):
        pj.make_train_step(
            loss_fn,
            optax.sgd(0.1),
            mesh=pj.data_mesh(1),
            weight_prediction=False,
            deviation_feedback=0.5,
        )


@pytest.mark.parametrize("shares", [(0.0, 0.5), (0.5, 0.0)])
def test_a_state_goes_with_its_feedback(shares):
    of, into = (
        pj.make_train_step(
            loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2), deviation_feedback=share
        )
        for share in shares
    )
    with pytest.raises(ValueError, match=r"`state` must .*have a deviation to be fed"):
        into.step(of.init(init_params()), batches(1)[0])
