"""Tests the keys and the count of steps that a step computes with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import pipejax as pj

from ...helpers import assert_bits_equal

DEVICES = 4


def test_drain_moves_neither_the_count_nor_the_key():
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


def test_key_differs_for_every_device_and_step():
    drawn = draws(1, seed=0)
    assert len(np.unique(drawn)) == drawn.size
    np.testing.assert_array_equal(drawn, draws(1, seed=0))
    assert not np.isin(drawn, draws(1, seed=1)).any()
    # The keys do not depend on the width, and the draws arrive later.
    np.testing.assert_array_equal(draws(3, seed=0), drawn[:-2])
