"""Tests that no state is taken of which one of two copies was replaced by hand."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pipejax as pj

from ..grid import grid
from ..helpers import batches, init_params, loss_fn
from .refusals import refused


def begun(tx=None, **settings):
    train = pj.make_train_step(
        loss_fn, tx or optax.adamw(1e-2), mesh=pj.data_mesh(4), **settings
    )
    return train, train.init(init_params())


def clipped(state):
    trained = state.trainable
    params = jax.tree.map(lambda w: jnp.clip(w, -0.1, 0.1), trained.params)
    return state._replace(trainable=trained._replace(params=params))


@grid(1, width=[2, 1], when=["step", "init", "drain"])
def test_parameters_beside_their_gathered_copy_are_not_replaced(width, when):
    train, state = begun(shard_optimizer=True, width=width)
    (batch,) = batches(1)
    if when != "init":
        state, _ = train.step(state, batch)
    if when == "drain":
        state, _ = train.drain(state)
    for method in (lambda x: train.step(x, batch), train.drain):
        with refused("`state.params` must not be replaced by hand alone"):
            method(clipped(state))
    again = train.init(clipped(state).params, opt_state=state.opt_state)
    train.step(again, batch)
    train.step(state, batch)


def test_replaced_parameters_without_a_copy_are_taken():
    train, state = begun()
    (batch,) = batches(1)
    state, _ = train.step(clipped(state), batch)
    assert np.abs(state.params["out"]).max() < 0.2


def test_states_from_before_and_copies_are_taken():
    train, first = begun(shard_optimizer=True)
    data = batches(3)
    state, _ = train.step(first, data[0])
    other, _ = train.step(state, data[1])
    train.step(state, data[2])
    train.step(jax.tree.map(jnp.copy, other), data[2])
    train.step(first, data[1])
    for past in (first, state):
        with refused("`state.params` must not be replaced by hand alone"):
            train.step(clipped(past), data[0])


def test_pairs_of_dropped_states_are_forgotten():
    train, state = begun(shard_optimizer=True)
    for batch in batches(4):
        state, _ = train.step(state, batch)
    jax.block_until_ready(state)
    gc.collect()
    state, _ = train.step(state, batch)
    assert len(train.known_pairs._pairs) <= 2


def scaled(tree, scale):
    def leaf(path, x):
        name = jax.tree_util.keystr(path)
        return jnp.full_like(x, scale) if name.endswith(".scale") else x

    return jax.tree_util.tree_map_with_path(leaf, tree)


def test_counters_of_delayed_parameters_are_replaced_with_the_others():
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    delayed = {"hidden": False, "bias": True, "out": True}
    train, state = begun(tx, delayed=delayed)
    for batch in batches(3):
        state, _ = train.step(state, batch)
    trained = state.trainable
    alone = trained._replace(opt_state=scaled(trained.opt_state, 0.0))
    with refused("`state.opt_state` must not be replaced by hand alone"):
        train.step(state._replace(trainable=alone), batch)
    both = alone._replace(delayed_counters=scaled(trained.delayed_counters, 0.0))
    after, _ = train.step(state._replace(trainable=both), batch)
    for name, leaf in state.params.items():
        np.testing.assert_array_equal(after.params[name], leaf)
