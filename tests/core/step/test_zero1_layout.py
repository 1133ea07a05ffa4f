"""Tests how the arrays of a sharded optimizer are planned, and which are refused."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj


def made(tx, devices):
    return pj.make_train_step(
        lambda w, x: ((x @ w) ** 2).mean(),
        tx,
        mesh=pj.data_mesh(devices),
        shard_optimizer=True,
    )


@pytest.mark.parametrize(
    ("devices", "spec"), [(4, P("data")), (3, P(None, "data")), (1, P())]
)
def test_arrays_are_split_along_their_first_divisible_axis(devices, spec):
    state = made(optax.adam(0.1), devices).init(jnp.ones((4, 6)))
    for array in (state.params, state.opt_state[0].mu):
        assert array.sharding.spec == spec
    assert jax.tree.leaves(state.trainable.gathered) != [] or devices == 1


@pytest.mark.parametrize("devices", [4, 1])
def test_optimizer_of_whole_gradients_is_refused(devices):
    said = "`tx` must update each element from .* got an operation `transpose`"
    with pytest.raises(ValueError, match=said):
        made(optax.contrib.muon(1e-2), devices).init(jnp.ones((8, 4)))
