"""Tests one device's part of a step: its prediction, its feedback and its keys."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import pipejax as pj
from pipejax import problems
from pipejax._core.message import InFlight, Message, Passengers
from pipejax.train_step._state import SharedState

from ..grid import grid
from ..helpers import (
    HELD,
    OPTIMIZERS,
    assert_bits_equal,
    batches,
    init_params,
    loss_fn,
)
from ..reference import pipe_sgd

DEVICES, STEPS = 4, 9


def drained(data, tx, *, loss=loss_fn, params=None, **settings):
    """Returns the parameters after a run and its drain."""
    train = pj.make_train_step(loss, tx, **settings)
    state = train.init(init_params() if params is None else params)
    for batch in data:
        state, _ = train.step(state, batch)
    return train.drain(state)[0].params


@grid(1, name=OPTIMIZERS, width=[2, 4], executor=["fused", "host"])
def test_one_device_predicts_what_comes(width, name, executor):
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


@grid(width=[2, 3], name=OPTIMIZERS, warmup_steps=[0, 3], feedback=[0.0, 0.5, None])
def test_recursion(width, name, warmup_steps, feedback):
    """Compares with the recursion without pipejax; rounding is as in `test_step`.

    Without feedback, predictions are linearized.
    """
    tx, data = OPTIMIZERS[name], batches(STEPS)
    linearized = feedback is None
    got = drained(
        data,
        tx,
        mesh=pj.data_mesh(4),
        width=width,
        warmup_steps=warmup_steps,
        deviation_feedback=feedback or 0.0,
        weight_prediction="linearized" if linearized else "own",
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
        predict="linearized" if linearized and name in HELD else "own",
        held=HELD.get(name),
        feedback=feedback or 0.0,
    )[-1]
    chex.assert_trees_all_close(got, expected, rtol=0, atol=4e-6)


@grid(1, width=[2, 3, 4], tx=[optax.sgd(0.02, momentum=0.9), optax.sgd(0.1)])
def test_on_a_quadratic_it_takes_synchronous_steps(width, tx):
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


@grid(1, width=[3, 2], feedback=[0.5, None])
def test_executors_agree_to_the_bit(width, feedback):
    run = functools.partial(
        drained,
        batches(STEPS),
        OPTIMIZERS["clip+adamw"],
        mesh=pj.data_mesh(4),
        width=width,
        deviation_feedback=feedback or 0.0,
        weight_prediction="own" if feedback else "linearized",
    )
    assert_bits_equal(run(executor="fused"), run(executor="host"))


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_deviations_sum_to_nothing_and_end_with_the_drain(executor):
    train = pj.make_train_step(
        loss_fn,
        optax.adam(1e-2),
        mesh=pj.data_mesh(4),
        deviation_feedback=0.5,
        weight_prediction="own",
        executor=executor,
    )
    state, kept = train.init(init_params()), []
    for batch in batches(4):
        state, _ = train.step(state, batch)
        kept.append(by_device(state.in_flight.deviation))
    assert not kept[0].any()  # nothing has arrived yet
    for own in kept[1:]:
        assert np.abs(own).max() > 1e-3
        np.testing.assert_allclose(own.sum(axis=0), 0, atol=1e-6)
    assert not by_device(train.drain(state)[0].in_flight.deviation).any()


def by_device(gradients):
    """Returns the gradients as one vector for each of four devices."""
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
            weight_prediction="own",
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
    found = ahead.transfers(state, data[0])
    assert found == plain.transfers(plain.init(init_params()), data[0])


@pytest.mark.parametrize("feedback", [None, 0.0, 0.5])
def test_a_gradient_that_is_not_finite_is_not_followed(feedback):
    """A device would otherwise compute at NaN, and send NaN from then on."""
    train = pj.make_train_step(
        loss_fn,
        optax.adam(1e-2),
        mesh=pj.data_mesh(2),
        deviation_feedback=feedback or 0.0,
        weight_prediction="linearized" if feedback is None else "own",
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


@pytest.mark.parametrize("weight", [None, 4.0])
@pytest.mark.parametrize(
    ("filled", "wanted"),
    [
        (2, 10 - (4 + 0.25 * 8) / 2 - 2 / 2),
        # Only the newer gradient is real, and the deviation belongs to the older one.
        (1, 10 - 2 / 2),
        (0, 10),
    ],
)
def test_a_prediction_by_hand(filled, wanted, weight):
    """w is 10, the learning rate 1/2; 4 and 2 are in flight, and 1/4 is fed back."""
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(0.5),
        mesh=pj.data_mesh(1),
        width=3,
        deviation_feedback=0.25,
        weight_prediction="own",
    )
    state = train.init(np.float32(10))
    passengers = Passengers.of(
        jnp.float32(0), None, None if weight is None else jnp.float32(weight)
    )
    in_flight = InFlight(
        # A gradient travels multiplied by its weight. A deviation is kept without its
        # weight.
        pending=tuple(
            Message(jnp.float32([g * (weight or 1)]), None, passengers) for g in (4, 2)
        ),
        filled=jnp.array([filled]),
        codec_states={},
        deviation=jnp.float32([8]),
    )
    found = train.local_step.point(SharedState.of(state), in_flight)
    assert float(found) == wanted


def weighted(w, batch):
    return w * batch["x"].mean(), pj.Aux(weight=batch["n"].sum())


@pytest.mark.parametrize(
    ("weights", "deviation"),
    [
        ([1, 1], [1 - 3, 5 - 3]),
        ([1, 3], [1 - 4, 5 - 4]),  # the mean of 1, 5, 5 and 5
    ],
)
def test_a_deviation_by_hand(weights, deviation):
    """Two devices have the gradients 1 and 5; then one of them is not finite."""
    train = pj.make_train_step(
        weighted,
        optax.sgd(0.1),
        mesh=pj.data_mesh(2),
        deviation_feedback=0.5,
        weight_prediction="own",
    )
    batch = {"x": np.float32([1, 5]), "n": np.float32(weights)}
    state, found = train.init(np.float32(1), batch=batch), []
    for x in (batch, batch | {"x": np.float32([1, np.nan])}, batch):
        state, _ = train.step(state, x)
        found.append(state.in_flight.deviation.tolist())
    assert found == [[0, 0], deviation, [0, 0]]


def test_a_drain_moves_neither_the_count_nor_the_key():
    def loss(w, batch, *, rng):
        return w * batch.mean() * jax.random.uniform(rng)

    train = pj.make_train_step(loss, optax.sgd(0.1), mesh=pj.data_mesh(1))
    key = jax.random.key(0)
    state, _ = train.step(train.init(np.float32(1), rng=key), np.ones(2, np.float32))
    drained, (info,) = train.drain(state)
    assert bool(info.applied)
    assert (int(state.step), int(drained.step)) == (1, 1)
    before, after = map(jax.random.key_data, (state.rng, drained.rng))
    assert_bits_equal(after, before)
    assert (before != jax.random.key_data(key)).any()


def drawing(params, batch, *, rng):
    """Returns a loss whose metrics are the draws, one for each device."""
    here = jnp.arange(DEVICES) == lax.axis_index("data")
    drawn = jax.random.uniform(rng)
    return params * batch.mean(), pj.Aux(
        metrics=list(jnp.where(here, drawn, 0) * DEVICES)
    )


def draws(width, seed, steps=6):
    """Returns the draws, [steps, devices], without the rows that have not arrived."""
    train = pj.make_train_step(
        drawing, optax.sgd(0.1), mesh=pj.data_mesh(DEVICES), width=width
    )
    batch, infos = np.ones(DEVICES, np.float32), []
    state = train.init(np.float32(0), rng=jax.random.key(seed), batch=batch)
    for _ in range(steps):
        state, info = train.step(state, batch)
        infos.append(info)
    assert len(set(pj.replica_digest(state).values())) == 1
    return np.stack([info.metrics for info in infos])[width - 1 :]


def test_a_key_for_every_device_and_step():
    drawn = draws(1, seed=0)
    assert len(np.unique(drawn)) == drawn.size
    np.testing.assert_array_equal(drawn, draws(1, seed=0))
    assert not np.isin(drawn, draws(1, seed=1)).any()
    # The keys do not depend on the width, and the draws arrive later.
    np.testing.assert_array_equal(draws(3, seed=0), drawn[:-2])
