"""Tests what a device knows of a sharded optimizer, and how owners coast."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pipejax.shards import UNSHARDED, Shards
from pipejax.train_step._ahead import Needs, coasted
from pipejax.train_step._places import Places

PARAMS = {"b": jnp.ones(3), "w": jnp.ones((8, 6))}
SHARDS = Shards(cuts=(None, 0))


def needs(tx, devices=4):
    places = Places.of(tx, PARAMS, SHARDS, "data", {"data": devices})
    return Needs.of(tx, PARAMS, places), places


def test_of_adam_the_second_moments_that_are_split():
    found, _ = needs(optax.adamw(0.1))
    assert not found.params
    assert found.leaves == (4,)  # count, mu of b and w, nu of b, and nu of w
    assert found.coarse.pieces[0].shape == (2, 6)


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)])
def test_of_linear_optimizers_nothing(tx):
    found, _ = needs(tx)
    assert found.leaves == ()
    assert found.copied(tx.init(PARAMS), UNSHARDED) is None


def test_on_one_device_everything_is_known():
    found, places = needs(optax.adamw(0.1), devices=1)
    state = optax.adamw(0.1).init(PARAMS)
    assert found.leaves == ()
    known = found.known(state, None, places, UNSHARDED)
    assert jax.tree.structure(known) == jax.tree.structure(state)
    assert known[0].mu["w"] is state[0].mu["w"]


def test_what_is_known_of_adam():
    """Counters and whole arrays, coarse copies, and zeros for first moments."""
    tx = optax.adamw(0.1)
    state = tx.init(PARAMS)
    moments = {"b": jnp.full(3, 0.7), "w": jnp.full((8, 6), 0.5)}
    adam = state[0]._replace(count=jnp.int32(3), mu=moments, nu=moments)
    state = (adam, *state[1:])
    found, places = needs(tx)
    coarse = found.copied(state, UNSHARDED)
    piece = {"b": moments["b"], "w": moments["w"][:2]}
    own = (adam._replace(mu=piece, nu=piece), *state[1:])
    known = found.known(own, coarse, places, UNSHARDED)[0]
    assert known.count == 3
    np.testing.assert_array_equal(known.nu["w"], 0.5)
    np.testing.assert_array_equal(known.mu["w"], 0)
    np.testing.assert_array_equal(known.nu["b"], moments["b"])
    assert known.mu["w"].shape == (8, 6)


@pytest.mark.parametrize("real", [(), (False,), (True,), (False, True), (True, True)])
def test_momentum_coasts_once_for_each_real_message(real):
    tx = optax.sgd(1.0, momentum=0.5)
    velocity = {"b": jnp.full(3, 4.0), "w": jnp.full((8, 6), 4.0)}
    state = (optax.TraceState(velocity), *tx.init(PARAMS)[1:])
    flags = [jnp.array(x) for x in real]
    found = coasted(tx, PARAMS, state, jnp.float32(0), flags)
    wanted = 1 - sum(4 * 0.5**i for i in range(1, sum(real) + 1))
    np.testing.assert_array_equal(found["w"], wanted)
