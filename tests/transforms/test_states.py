"""Tests that transforms keep a state for each device, without non-finite numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ..grid import grid
from ..helpers import assert_bits_equal
from .loops import DEVICES, MEANS, TRANSFORMS, Loop, axis_of, random_like

TREE = {"w": jnp.zeros((8, 12)), "b": jnp.zeros(5)}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_states_have_no_scalars_and_split_along_the_axis(name):
    """The states of all devices are laid side by side along the first axis."""
    tx, axis = TRANSFORMS[name], axis_of(name)
    loop = Loop(tx, TREE, axis)
    own = jax.tree.leaves(loop.specs, is_leaf=lambda x: isinstance(x, P))
    assert own == [P(axis)]
    assert all(leaf.ndim for leaf in jax.tree.leaves(jax.eval_shape(loop.init)))


STATEFUL = [
    *("compress sign", "compress top_k", "compress power_sgd", "compress stochastic"),
    "psum power_sgd",
    "two_shot sign",
    "tree top_k",
]


@grid(1, name=STATEFUL, bad=[np.nan, np.inf])
def test_state_keeps_nothing_of_an_update_with_nan(name, bad):
    """Residuals, keys and warm starts keep their bits if an update is not finite."""
    gradients = random_like(TREE, (3, DEVICES))
    gradients["w"][1, :, 2, 3] = bad
    loop = Loop(TRANSFORMS[name], TREE, axis_of(name))
    state, seen = loop.init(), []
    for t in range(3):
        state, updates = loop.step(state, jax.tree.map(lambda g, t=t: g[t], gradients))
        finite = np.isfinite(updates["w"]).all(axis=(1, 2))
        assert (finite == (t != 1)).all()
        seen.append(jax.tree.map(np.asarray, state))
    assert_bits_equal(seen[1], seen[0])
    leaves = list(zip(*map(jax.tree.leaves, seen[1:]), strict=True))
    assert any(not np.array_equal(a, b) for a, b in leaves)


def test_nan_on_one_device_keeps_the_states_of_all():
    loop = Loop(MEANS["two_shot sign"], TREE)
    gradients = random_like(TREE, (DEVICES,))
    gradients["b"][2, 0] = np.nan
    before = jax.tree.map(np.asarray, loop.init())
    after, updates = loop.step(loop.init(), gradients)
    assert_bits_equal(jax.tree.map(np.asarray, after), before)
    assert not np.isfinite(updates["b"][:, 0]).any()
