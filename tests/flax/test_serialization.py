"""Tests that a state goes through Flax's serialization, and trains on as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import pipejax as pj
import pipejax.flax

from ..grid import grid
from ..helpers import assert_bits_equal, batches, init_params


def loss_fn(params, batch, *, rng):
    """Returns a loss with all kinds of passengers."""
    hidden = jnp.tanh(batch["x"] @ params["hidden"] + params["bias"][None, :])
    noise = jax.random.normal(rng, batch["y"].shape)
    loss = jnp.mean((hidden @ params["out"] - batch["y"] + 0.1 * noise) ** 2)
    weight = jnp.sum(batch["x"] > 0)
    return loss, pj.Aux(metrics={"hidden": hidden.mean()}, weight=weight)


def started(devices, width, **settings):
    train = pj.make_train_step(
        loss_fn,
        optax.adamw(1e-2),
        mesh=pj.data_mesh(devices),
        width=width,
        **settings,
    )
    key = jax.random.PRNGKey(0)
    return train, train.init(init_params(), rng=key, batch=batches(1)[0])


@grid(devices=(4, 1), width=(2, 3, 1), warmup=(0, 2), executor=("host", "fused"))
def test_state_of_bytes_trains_on_bit_for_bit(devices, width, warmup, executor):
    train, state = started(devices, width, warmup_steps=warmup, executor=executor)
    data = batches(6)
    for batch in data[:3]:
        state, _ = train.step(state, batch)
    _, target = started(devices, width, warmup_steps=warmup)
    again = serialization.from_bytes(target, serialization.to_bytes(state))
    assert_bits_equal(again, state)
    for batch in data[3:]:
        state, info = train.step(state, batch)
        again, found = train.step(again, batch)
        assert_bits_equal(found, info)
    assert_bits_equal(train.drain(again), train.drain(state))
    assert np.isfinite(info.loss)


@pytest.mark.full
@grid(1, executor=("fused", "host"), rounds=((4, 3), (2, 0)), steps=(1, 6))
def test_local_state_of_bytes_trains_on_bit_for_bit(executor, rounds, steps):
    codec = pj.codecs.error_feedback(pj.codecs.int8(8))
    train = pj.make_local_step(
        loss_fn,
        optax.adamw(1e-2),
        mesh=pj.data_mesh(4),
        outer_tx=optax.sgd(0.7, momentum=0.9),
        sync_every=rounds[0],
        overlap_steps=rounds[1],
        warmup_steps=2,
        all_reduce=pj.collectives.two_shot(codec),
        executor=executor,
    )
    key, data = jax.random.PRNGKey(0), batches(10)
    target = state = train.init(init_params(), rng=key, batch=data[0])
    for batch in data[:steps]:
        state, _ = train.step(state, batch)
    again = serialization.from_bytes(target, serialization.to_bytes(state))
    assert_bits_equal(again, state)
    assert_bits_equal(again.params, state.params)
    assert_bits_equal(again.opt_state, state.opt_state)
    for batch in data[steps:]:
        state, info = train.step(state, batch)
        again, found = train.step(again, batch)
        assert_bits_equal(found, info)
    assert_bits_equal(train.drain(again), train.drain(state))


def test_local_state_of_shards_is_refused():
    mesh = pj.data_mesh(4, axis_name=("host", "device"), hosts=2)
    train = pj.make_local_step(loss_fn, optax.adamw(1e-2), mesh=mesh, axis_name="host")
    batch = train.batch(batches(1)[0], axis_name=("host", "device"))
    state = train.init(init_params(), rng=jax.random.PRNGKey(0), batch=batch)
    with pytest.raises(ValueError, match=r"`state` must .* `pipejax\.checkpoint`\."):
        serialization.to_bytes(state)


def test_state_of_shards_is_refused():
    _, state = started(2, 2, shard_optimizer=True)
    with pytest.raises(ValueError, match=r"`state` must .* `pipejax\.checkpoint`\."):
        serialization.to_bytes(state)
