"""Tests model state, metrics, and many of Optax's optimizers."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj

from ..grid import grid
from ..helpers import assert_bits_equal, batches, init_params, loss_fn
from ..reference import mean, pipe_sgd, split

DEVICES = 4


def make(loss, tx=None, **settings):
    return pj.make_train_step(
        loss, tx or optax.sgd(0.1), mesh=pj.data_mesh(DEVICES), **settings
    )


def run(train, state, data):
    states, infos = [], []
    for batch in data:
        state, info = train.step(state, batch)
        states.append(state)
        infos.append(info)
    return states, infos


# Tests of model state.


def averaging(params, batch, *, model_state):
    """Moves the model state halfway to the mean of the device's share."""
    after = 0.5 * model_state + 0.5 * batch.mean()
    return params * jnp.float32(0.0), pj.Aux(model_state=after)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_model_state_obeys_the_recursion(width):
    """`s[t] = s[t-1] + mean d[t-K]` is exact for small integers over powers of two.

    Each device computes at s plus its own changes in flight.
    """
    rng = np.random.default_rng(0)
    data = rng.integers(0, 16, size=(6, 4 * DEVICES)).astype(np.float32)
    train = make(averaging, width=width, weight_prediction=False)
    state = train.init(np.float32(1), model_state=np.float32(8))
    states, _ = run(train, state, data)
    got = [s.model_state for s in [*states, train.drain(states[-1])[0]]]

    s, in_flight, expected = np.float32(8), [], []
    for batch in data:
        own = [s + sum(changes) for changes in zip(*in_flight, strict=True)] or [s] * 4
        pairs = zip(own, split(batch, 4), strict=True)
        in_flight.append([0.5 * a + 0.5 * x.mean() - a for a, x in pairs])
        if len(in_flight) == width:
            s = s + mean(in_flight.pop(0))
        expected.append(s)
    expected.append(s + sum(map(mean, in_flight)))
    np.testing.assert_array_equal(np.stack(got), np.stack(expected))


def counting(params, batch, *, model_state):
    after = {
        "count": model_state["count"] + 1,
        "key": jax.random.split(model_state["key"])[0],
        "mean": model_state["mean"] + batch.mean(),
    }
    return params * batch.mean(), pj.Aux(model_state=after)


@pytest.mark.parametrize("width", [1, 3])
def test_counters_and_keys_advance_at_once(width):
    """They advance while the floating leaf waits, and in spite of a skipped update."""
    key = jax.random.key(7)
    train = make(counting, width=width)
    state = train.init(
        np.float32(0),
        model_state={"count": np.int32(0), "key": key, "mean": np.float32(0)},
    )
    data = np.ones((5, DEVICES), np.float32)
    data[1, 2] = np.nan
    states, infos = run(train, state, data)
    for t, state in enumerate(states):
        key = jax.random.split(key)[0]
        assert int(state.model_state["count"]) == t + 1
        assert state.model_state["key"].dtype == key.dtype
        assert_bits_equal(*map(jax.random.key_data, (state.model_state["key"], key)))
        arrived = t + 2 - width
        skipped = arrived >= 2
        assert float(state.model_state["mean"]) == max(0, arrived - skipped)
        assert int(infos[t].skipped) == skipped
    drained, _ = train.drain(states[-1])
    assert float(drained.model_state["mean"]) == 4
    assert int(drained.model_state["count"]) == 5
    assert len(set(pj.replica_digest(drained).values())) == 1


# Tests of metrics.


def reporting(params, batch):
    loss = loss_fn(params, batch)
    positive = batch["y"] > 0
    metrics = {"any": positive[0, 0], "rate": list(positive.mean(0)), "loss": loss}
    return loss, pj.Aux(metrics=metrics)


@grid(1, width=[1, 3], microbatches=[1, 2])
def test_metrics_are_delayed_means(width, microbatches):
    data = batches(6)
    train = make(
        reporting, width=width, microbatches=microbatches, weight_prediction=False
    )
    state = train.init(init_params(), batch=data[0])
    states, infos = run(train, state, data)
    late = width - 1
    for info in infos[:late]:
        assert all(np.isnan(x).all() for x in jax.tree.leaves(info.metrics))
    for info, batch in zip(infos[late:], data, strict=False):
        positive = batch["y"] > 0
        firsts = positive[:: 16 // (DEVICES * microbatches), 0]
        # Counts over powers of two are exact.
        assert float(info.metrics["any"]) == firsts.mean()
        np.testing.assert_array_equal(info.metrics["rate"], positive.mean(0))
        assert_bits_equal(info.metrics["loss"], info.loss)
        assert info.metrics["rate"][0].dtype == np.float32
    before = [init_params(), *(s.params for s in states)]
    for t, batch in enumerate(data[: len(data) - late]):
        wanted = loss_fn(before[t], batch)
        # The mean of 48 squares, summed pairwise, has 6 roundings of half an ulp, and a
        # residual and its square have 6, on either side.
        rtol = 12 * np.finfo(np.float32).eps
        np.testing.assert_allclose(infos[t + late].loss, wanted, rtol=rtol)


# Tests of Optax.


@pytest.mark.parametrize("width", [1, 3])
def test_value_is_the_loss_of_the_applied_gradients(width):
    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(jnp.zeros_like, updates), value

    tx = optax.GradientTransformationExtraArgs(lambda params: jnp.float32(0), update)
    train = make(loss_fn, tx, width=width)
    states, infos = run(train, train.init(init_params()), batches(5))
    for state, info in list(zip(states, infos, strict=True))[width - 1 :]:
        assert_bits_equal(state.opt_state, info.loss)


def test_reduce_on_plateau_halves_the_scale():
    """The loss stays equal, and the scale halves each time two more values came."""
    tx = optax.chain(
        optax.sgd(0.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=2)
    )
    train = make(loss_fn, tx, width=2)
    states, _ = run(train, train.init(init_params()), batches(1) * 8)
    scales = [float(s.opt_state[1].scale) for s in states]
    # Step 0 has no value, the first value in step 1 is the best, and then come pairs.
    assert scales == [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125]


def labels(params):
    return {name: "bias" if name == "bias" else "matrix" for name in params}


MORE_OPTIMIZERS = {
    "multi-steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "muon": optax.contrib.muon(1e-2),
    "masked": optax.chain(
        optax.masked(
            optax.add_decayed_weights(0.1),
            lambda params: {name: name != "bias" for name in params},
        ),
        optax.sgd(0.1),
    ),
    "multi-transform": optax.multi_transform(
        {"matrix": optax.sgd(0.05, momentum=0.9), "bias": optax.adam(1e-2)}, labels
    ),
}


@pytest.mark.parametrize("name", MORE_OPTIMIZERS)
def test_other_optimizers_equal_the_reference_on_one_device(name):
    """On one device nothing is summed, so the bits are those of the reference."""
    tx, data, width = MORE_OPTIMIZERS[name], batches(7), 2
    train = pj.make_train_step(loss_fn, tx, mesh=pj.data_mesh(1), width=width)
    states, _ = run(train, train.init(init_params()), data)
    got = [s.params for s in [*states, train.drain(states[-1])[0]]]
    reference = functools.partial(pipe_sgd, loss_fn, tx, init_params(), data)
    expected = reference(workers=1, width=width, drain=True, predict=True)
    if name != "muon":
        assert_bits_equal(got, expected)
        return
    # Matrix products are summed in the order of their program, and the prediction is in
    # another program: each update may differ by an ulp.
    chex.assert_trees_all_close(got, expected, rtol=0, atol=1e-6)


def test_multi_steps_object_is_accepted_as_optimizer():
    """The optimizer is the object itself, not its `gradient_transformation()`."""
    data = batches(4)
    train = make(loss_fn, optax.MultiSteps(optax.sgd(0.1), 2), width=1)
    states, infos = run(train, train.init(init_params()), data)
    assert_bits_equal(states[0].params, init_params())
    assert_bits_equal(states[2].params, states[1].params)
    assert int(states[-1].opt_state.gradient_step) == 2
    assert all(bool(info.applied) for info in infos), "it was given every gradient"
