"""Tests properties of every transform that is listed in `loops.TRANSFORMS`."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ..grid import each
from ..helpers import assert_bits_equal
from .loops import (
    DEVICES,
    LOCAL,
    MEANS,
    STEPS,
    TRANSFORMS,
    VARIANTS,
    Loop,
    axis_of,
    random_like,
)

TREE = {
    "nested": ({"w": jnp.zeros((8, 12)), "half": jnp.zeros(9, jnp.bfloat16)},),
    "scalar": jnp.zeros(()),
    "void": jnp.zeros((0, 3)),
    "none": {},
}
GRADIENTS = random_like(TREE, (STEPS, DEVICES))
EACH = pytest.mark.parametrize("name", each(TRANSFORMS, full=VARIANTS))


@functools.cache
def loop(name):
    return Loop(TRANSFORMS[name], TREE, axis_of(name))


@functools.cache
def ran(name):
    return loop(name).run(GRADIENTS)


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype).name), tree)


@EACH
def test_updates_are_like_gradients_and_traced_once(name):
    updates, _ = ran(name)
    assert shapes(updates) == shapes(GRADIENTS)
    assert all(np.isfinite(x.astype("f4")).all() for x in jax.tree.leaves(updates))
    # `run` has asserted that there is no more than one trace.
    assert loop(name).traces >= 1


@EACH
def test_scan_gives_the_same_updates_as_a_loop(name):
    updates, state = ran(name)
    last, scanned = loop(name).scan(loop(name).init(), GRADIENTS)
    if "power_sgd" not in name:
        assert_bits_equal((scanned, last), (updates, state))
        return
    # XLA multiplies matrices by one kernel in a loop and by another one outside, and
    # these add in different orders: 12 products, then 8, and the norm of 8. Each term
    # is rounded twice, and is at most the norm of all gradients so far, in each of
    # three steps.
    norm = np.linalg.norm(GRADIENTS["nested"][0]["w"])
    bound = 3 * 2 * (12 + 8 + 8) * 2.0**-24 * norm
    chex.assert_trees_all_close((scanned, last), (updates, state), rtol=0, atol=bound)


@EACH
def test_eval_shape_gives_the_shapes_of_updates_and_state(name):
    """`eval_shape` works, and a state keeps its form, as `lax.scan` requires."""
    first = jax.tree.map(lambda g: g[0], GRADIENTS)
    state = jax.eval_shape(loop(name).init)
    after, updates = jax.eval_shape(loop(name).update, state, first)
    assert shapes(after) == shapes(state) == shapes(ran(name)[1])
    assert shapes(updates) == shapes(first)


@pytest.mark.parametrize("name", each(MEANS, full=VARIANTS))
def test_every_device_has_the_same_updates(name):
    updates, _ = ran(name)
    for leaf in jax.tree.leaves(updates):
        assert_bits_equal(leaf, np.repeat(leaf[:, :1], DEVICES, axis=1))


@EACH
def test_trees_without_elements_pass_unchanged(name):
    for tree in ({}, (), {"void": jnp.zeros(0)}, {"a": {}, "b": [(), None]}):
        empty = Loop(TRANSFORMS[name], tree, axis_of(name))
        like = random_like(tree, (DEVICES,))
        state = jax.eval_shape(empty.init)
        after, updates = jax.eval_shape(empty.update, state, like)
        assert shapes(updates) == shapes(like)
        assert shapes(after) == shapes(state)


def scaled():
    """Makes a transform that requires an argument of its own."""

    def update(updates, state, params=None, *, factor, **extra):
        del params, extra
        return jax.tree.map(lambda u: factor * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


@EACH
def test_masked_transform_works_in_a_chain_with_extra_arguments(name):
    """Masked leaves pass unchanged, and extra arguments reach their transform."""
    tree = {"w": jnp.zeros((6, 8)), "own": jnp.zeros(5)}
    gradients = random_like(tree, (2, DEVICES), seed=1)
    masked = optax.masked(TRANSFORMS[name], {"w": True, "own": False})
    tx = optax.chain(optax.with_extra_args_support(masked), scaled())
    chained, _ = Loop(tx, tree, axis_of(name), factor=4.0).run(gradients)
    np.testing.assert_array_equal(chained["own"], 4 * gradients["own"])
    alone = {"w": gradients["w"]}
    updates, _ = Loop(TRANSFORMS[name], {"w": tree["w"]}, axis_of(name)).run(alone)
    np.testing.assert_array_equal(chained["w"], 4 * updates["w"])


@pytest.mark.parametrize("name", each(LOCAL, full=VARIANTS))
def test_local_transforms_work_without_devices(name):
    """Under plain jit, a transform gives the device's update, except random ones."""
    tx = LOCAL[name]
    state, update = tx.init(TREE), jax.jit(tx.update)
    mine = jax.tree.map(lambda g: g[0, 1], GRADIENTS)
    updates, after = update(mine, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    wanted = jax.tree.map(lambda u: u[0, 1], ran(name)[0])
    # One product in ten is rounded once more or less: by a unit in the last place of
    # numbers below 8, or of bfloat16 for leaves that are converted back to it.
    for got, want in zip(
        jax.tree.leaves(updates), jax.tree.leaves(wanted), strict=True
    ):
        ulp = float(jnp.finfo(got.dtype).eps) * 4
        np.testing.assert_allclose(
            np.asarray(got, np.float32), want.astype(np.float32), rtol=0, atol=ulp
        )
