"""Tests what the update passes to an optimizer, and its form on accelerators."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax._core.step._update import moved, unmoved, updated

from ...grid import each
from ...helpers import assert_bits_equal, batches, init_params, loss_fn
from ...reference import mean, split

ONES = jnp.ones(2)

ONES = jnp.ones(2)


def plain(updates, state, params=None):
    del params
    return updates, state


def reading(updates, state, params=None, *, value):
    del params
    return value * updates, state


def needing(updates, state, params=None, *, value, value_fn):
    del params, value, value_fn
    return updates, state


def failing(updates, state, params=None, **extra):
    del updates, state, params, extra
    raise TypeError("something else")


def made(update):
    return optax.GradientTransformationExtraArgs(lambda params: (), update)


@pytest.mark.parametrize(
    ("tx", "factor"),
    [
        (made(plain), 1),
        (made(reading), 3),
        (optax.chain(made(plain), optax.identity()), 1),
    ],
)
def test_loss_reaches_optimizers_with_a_value_argument(tx, factor):
    updates, _ = updated(tx, ONES, tx.init(ONES), ONES, jnp.float32(3))
    assert_bits_equal(updates, factor * ONES)


def test_additional_arguments_are_refused_and_other_errors_pass():
    with pytest.raises(ValueError, match=r"`tx` must need nothing but .* 'value_fn'"):
        updated(made(needing), ONES, (), ONES, jnp.float32(3))
    with pytest.raises(TypeError, match="something else"):
        updated(made(failing), ONES, (), ONES, jnp.float32(3))


def plateau():
    adam = optax.adam(1e-2)
    return optax.chain(adam, optax.contrib.reduce_on_plateau(patience=1, factor=0.5))


WRAPPERS = {
    "sam": (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05)), False),
    "multi steps": (optax.MultiSteps(plateau(), 2), True),
    "sam in a chain": (
        optax.chain(
            optax.clip(1.0), optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))
        ),
        False,
    ),
    "plateau": (plateau(), True),
}
STEPS, DEVICES = 6, 2


def by_hand(tx, takes_value):
    """Returns the parameters of a synchronous loop over the shares of each batch."""
    params = init_params()
    state = tx.init(params)
    grad = jax.jit(jax.value_and_grad(loss_fn))
    for batch in batches(STEPS):
        losses, gradients = zip(
            *(grad(params, share) for share in split(batch, DEVICES)), strict=True
        )
        gradients = mean([jax.tree.map(np.asarray, g) for g in gradients])
        extra = {"value": np.float32(np.mean(losses))} if takes_value else {}
        updates, state = tx.update(gradients, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_train_like_a_loop_by_hand(name):
    tx, takes_value = WRAPPERS[name]
    train = pj.make_train_step(loss_fn, tx, mesh=pj.data_mesh(DEVICES), width=1)
    state = train.init(init_params())
    for batch in batches(STEPS):
        state, _ = train.step(state, batch)
    wanted = by_hand(tx, takes_value)
    # Adam enlarges roundings of 1 in 2^24 where its second moment is small.
    chex.assert_trees_all_close(state.params, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", each(WRAPPERS, full=["plateau", "sam"]))
def test_predicted_wrappers_on_one_device_are_synchronous(name):
    tx, _ = WRAPPERS[name]
    found = []
    for width in (1, 2):
        train = pj.make_train_step(loss_fn, tx, mesh=pj.data_mesh(1), width=width)
        state = train.init(init_params())
        for batch in batches(STEPS):
            state, _ = train.step(state, batch)
        found.append(train.drain(state)[0].params)
    chex.assert_trees_all_close(*found, rtol=0, atol=1e-5)


def test_counters_are_replaced_and_means_are_moved():
    state = {"mean": ONES, "seen": jnp.int32(1), "table": 3 * ONES}
    counters = {"mean": None, "seen": 2, "table": None}
    changes = {"mean": 2 * ONES, "seen": None, "table": None}
    out = moved(state, counters, changes)
    assert_bits_equal(out, {"mean": 3 * ONES, "seen": 2, "table": None})
    out = unmoved(state, counters, changes)
    assert_bits_equal(out, {"mean": ONES, "seen": 2, "table": None})
