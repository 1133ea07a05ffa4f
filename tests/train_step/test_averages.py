"""Tests a moving average of parameters inside the optimizer against one by hand."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import pipejax as pj
from pipejax import checkpoint

from ..core.step.parts import PARAMS, groups
from ..grid import grid
from ..helpers import batches, loss_fn

RATE = 0.1


def with_average(tx):
    def init(params):
        return tx.init(params), params

    def update(gradients, state, params):
        updates, inner = tx.update(gradients, state[0], params)
        after = optax.apply_updates(params, updates)
        return updates, (inner, optax.incremental_update(after, state[1], RATE))

    return optax.GradientTransformation(init, update)


def made(*, grouped, **settings):
    """Returns a train step of two devices, or of two groups of two, and its state."""
    mesh, params = pj.data_mesh(2), PARAMS
    if grouped:
        mesh, params = groups()
        settings["axis_name"] = "host"
    tx = with_average(optax.adam(1e-2))
    train = pj.make_train_step(loss_fn, tx, mesh=mesh, **settings)
    return train, train.init(params)


def followed(average, train, state):
    """Returns the average after the parameters of a state."""
    return optax.incremental_update(train.whole_params(state), average, RATE)


@grid(1, grouped=[False, True], sharded=[False, True], executor=["fused", "host"])
def test_average_in_the_optimizer_follows_every_update(grouped, sharded, executor):
    """It lags the batches as the parameters do, and takes in those of a drain."""
    train, state = made(grouped=grouped, shard_optimizer=sharded, executor=executor)
    average = jax.tree.map(jnp.asarray, PARAMS)
    for number, batch in enumerate(batches(5)):
        state, info = train.step(state, batch)
        assert bool(info.applied) == (number > 0)
        if info.applied:
            average = followed(average, train, state)
    state, _ = train.drain(state)
    average = followed(average, train, state)
    kept = jax.device_get(state.opt_state[1])
    chex.assert_trees_all_close(kept, jax.device_get(average), rtol=0, atol=2e-6)


@pytest.mark.parametrize("sharded", [False, True])
def test_average_of_a_checkpoint_has_every_bit(tmp_path, sharded):
    train, state = made(grouped=True, shard_optimizer=sharded)
    for batch in batches(3):
        state, _ = train.step(state, batch)
    with checkpoint.manager(tmp_path / "run") as manager:
        checkpoint.save(manager, state)
        manager.wait_until_finished()
        fresh, like = made(grouped=True, shard_optimizer=sharded)
        restored = checkpoint.restore(manager, fresh, like).state
    chex.assert_trees_all_equal(
        *(jax.device_get(each.opt_state[1]) for each in (restored, state))
    )
