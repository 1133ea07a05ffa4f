"""A linen model with batch norm and dropout, from a `TrainState` and back into it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import pipejax as pj
import pipejax.flax.linen

from ..helpers import assert_bits_equal

TX = optax.adam(3e-2)
STEPS = 40
CHANCE = np.log(3)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x)))
        return nn.Dense(3)(nn.Dropout(0.2, deterministic=not train)(x))


class State(TrainState):
    batch_stats: Any


def loss_fn(params, batch, *, model_state, rng):
    logits, model_state = Model().apply(
        {"params": params, **model_state},
        batch["x"],
        train=True,
        rngs={"dropout": rng},
        mutable=["batch_stats"],
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    hits = (logits.argmax(-1) == batch["y"]).mean()
    return loss, pj.Aux(metrics={"accuracy": hits}, model_state=model_state)


def batch_at(step, size=64):
    """Three classes, told apart by which of three features is the largest."""
    x = np.random.default_rng(step).normal(size=(size, 5)).astype(np.float32)
    return {"x": x, "y": x[:, :3].argmax(-1)}


def raw(tree):
    """Typed keys as integers, for NumPy to compare."""
    typed = jax.dtypes.prng_key
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, typed) else x, tree
    )


def fresh():
    variables = Model().init(jax.random.key(0), jnp.ones((1, 5)), train=False)
    return State.create(apply_fn=Model().apply, tx=TX, **variables)


@functools.cache
def make_train():
    return pj.make_train_step(loss_fn, TX, mesh=pj.data_mesh(4), width=2)


def run(train, state, steps=STEPS):
    losses = []
    for step in range(steps):
        state, info = train.step(state, batch_at(step))
        losses.append(float(info.loss))
    return state, losses


def test_a_train_state_is_trained_and_written_back():
    train, before = make_train(), fresh()
    state = pj.flax.linen.init(train, before, rng=jax.random.key(1), batch=batch_at(0))
    state, losses = run(train, state)
    assert np.isnan(losses[0]), "nothing arrives in the first step of width 2"
    assert losses[1] > 0.8 * CHANCE
    assert np.mean(losses[-5:]) < 0.5 * CHANCE

    after = pj.flax.linen.update(before, train.drain(state)[0])
    assert int(after.step) == STEPS
    assert int(after.opt_state[0].count) == STEPS
    test = batch_at(10_000, size=512)
    logits = after.apply_fn(
        {"params": after.params, "batch_stats": after.batch_stats},
        test["x"],
        train=False,
    )
    assert float((logits.argmax(-1) == test["y"]).mean()) > 0.75

    # The adapter adds nothing to the step it adapts to.
    plain = train.init(
        before.params,
        model_state={"batch_stats": before.batch_stats},
        rng=jax.random.key(1),
        batch=batch_at(0),
    )
    plain, _ = train.drain(run(train, plain)[0])
    assert_bits_equal(
        (after.params, after.opt_state, after.batch_stats),
        (plain.params, plain.opt_state, plain.model_state["batch_stats"]),
    )


def test_a_train_state_goes_on_where_it_was():
    train = make_train()
    state = pj.flax.linen.init(train, fresh(), rng=jax.random.key(1), batch=batch_at(0))
    whole, _ = train.drain(run(train, train.drain(run(train, state, 3)[0])[0], 3)[0])

    drained, _ = train.drain(run(train, state, 3)[0])
    halfway = pj.flax.linen.update(fresh(), drained)
    assert int(halfway.step) == 3
    again = pj.flax.linen.init(train, halfway, rng=drained.rng, batch=batch_at(0))
    again, _ = train.drain(run(train, again, 3)[0])
    assert_bits_equal(raw(again), raw(whole))


def test_a_train_state_without_batch_statistics():
    params = {"w": np.ones((5, 1), np.float32)}
    before = TrainState.create(apply_fn=None, params=params, tx=TX)
    train = pj.make_train_step(
        lambda p, batch: jnp.mean((batch["x"] @ p["w"]) ** 2),
        TX,
        mesh=pj.data_mesh(4),
        width=1,
    )
    state = pj.flax.linen.init(train, before)
    assert state.model_state is None
    after = pj.flax.linen.update(before, train.step(state, batch_at(0))[0])
    assert int(after.step) == 1
    assert not np.array_equal(after.params["w"], before.params["w"])


def test_gradients_in_flight_are_not_lost():
    train, before = make_train(), fresh()
    state = pj.flax.linen.init(train, before, rng=jax.random.key(1), batch=batch_at(0))
    assert_bits_equal(pj.flax.linen.update(before, state).params, before.params)
    state, _ = train.step(state, batch_at(0))
    message = r"got 1 computed .* `state, _ = train.drain\(state\)`"
    with pytest.raises(ValueError, match=message):
        pj.flax.linen.update(before, state)
