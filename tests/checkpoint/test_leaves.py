"""Tests that leaves of every name, structure and dtype are restored bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import pipejax as pj
from pipejax import checkpoint

from ..helpers import with_trainable
from . import zoo


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.full), 8])
def test_leaves_of_every_kind_are_restored(manager, devices):
    train = zoo.train_step(devices)
    state = zoo.filled_at_random(zoo.init(train))
    checkpoint.save(manager, state)
    like = jax.eval_shape(lambda: zoo.init(train))
    zoo.assert_same(checkpoint.restore(manager, train, like).state, state)


def test_checkpoint_is_read_by_name_without_pipejax(manager):
    train = zoo.train_step(1)
    state = zoo.init(train)
    checkpoint.save(manager, state)
    manager.wait_until_finished()
    with ocp.StandardCheckpointer() as checkpointer:
        leaves = checkpointer.restore(manager.directory / "0" / "state")
    assert set(leaves) >= {"params['dots']['a.b']", "params['dots']['a']['b']", "step"}
    np.testing.assert_array_equal(leaves["params['scalar']"], np.float32(1.5))


def scaled(params, batch):
    """Computes a loss, in bfloat16 if `scale` has a weak type."""
    return jnp.mean((params["scale"] * batch["x"]).astype(jnp.float32) ** 2)


def test_restored_weak_type_stays_weak(manager):
    """A restored weak type stays weak: a strong type would not round to bfloat16."""
    train = pj.make_train_step(scaled, optax.sgd(0.01), mesh=pj.data_mesh(2))
    x = np.random.default_rng(0).normal(size=(8, 4))
    batch = {"x": jnp.asarray(x, jnp.bfloat16)}

    def run(state):
        for _ in range(3):
            state, _ = train.step(state, batch)
        return state

    weak = {"scale": jnp.asarray(1.1)}
    state = run(train.init(weak))
    checkpoint.save(manager, state)
    restored = checkpoint.restore(manager, train, train.init(weak)).state
    strong = jax.tree.map(lambda x: x.astype(x.dtype), state.params)
    expected = run(state).params["scale"]
    assert run(restored).params["scale"] == expected
    assert run(with_trainable(state, params=strong)).params["scale"] != expected
