"""What transforms keep: each device its own, and nothing of what is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives, transforms
from pipejax.transforms import CompressState

from ..grid import grid
from ..helpers import assert_bits_equal
from .loops import DEVICES, LOCAL, MEANS, TRANSFORMS, Loop, axis_of, random_like

TREE = {"w": jnp.zeros((8, 12)), "b": jnp.zeros(5)}


def test_specs_of_both_states():
    """Each device's own of these two, the same of all else."""
    tx = optax.chain(
        transforms.error_feedback(codecs.sign(8)),
        transforms.pipelined_mean("data", width=2),
        optax.adam(1e-3),
    )
    specs = pj.state_specs(jax.eval_shape(tx.init, TREE), "rows")
    assert specs[:2] == (P("rows"), P("rows"))
    assert set(jax.tree.leaves(specs[2])) == {P()}


def test_one_vector_of_all_dtypes():
    mixed = TREE | {"half": jnp.zeros(10, jnp.bfloat16), "void": jnp.zeros(0, "f2")}
    state = transforms.error_feedback(codecs.sign(8)).init(mixed)
    assert isinstance(state, CompressState)
    # 101 and 10 elements, in blocks of 8.
    assert state.codec.residual.shape == (112,)
    assert state.codec.residual.dtype == jnp.float32


@pytest.mark.parametrize("name", TRANSFORMS)
def test_no_scalars_in_the_states(name):
    """Those of all devices are laid side by side along the first axis."""
    tx, axis = TRANSFORMS[name], axis_of(name)
    loop = Loop(tx, TREE, axis)
    own = jax.tree.leaves(loop.specs, is_leaf=lambda x: isinstance(x, P))
    assert own == [P(axis)]
    assert all(leaf.ndim for leaf in jax.tree.leaves(jax.eval_shape(loop.init)))


STATEFUL = [
    *(name for name in LOCAL if "feedback" in name),
    "compress stochastic",
    "psum power_sgd",
    "two_shot sign",
    "tree top_k",
]


@grid(1, name=STATEFUL, bad=[np.nan, np.inf])
def test_of_what_is_not_finite_nothing_is_kept(name, bad):
    """Residuals, keys and warm starts stay as they were, to the bit."""
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


def test_one_bad_device_and_all_keep_what_they_had():
    loop = Loop(MEANS["two_shot sign"], TREE)
    gradients = random_like(TREE, (DEVICES,))
    gradients["b"][2, 0] = np.nan
    before = jax.tree.map(np.asarray, loop.init())
    after, updates = loop.step(loop.init(), gradients)
    assert_bits_equal(jax.tree.map(np.asarray, after), before)
    assert not np.isfinite(updates["b"][:, 0]).any()


def test_the_sum_of_updates_follows_the_sum_of_gradients():
    """`sum Delta = sum g - e`; each of two operations a step rounds what is below s."""
    steps, tree = 8, {"w": jnp.zeros(64)}
    tx = transforms.error_feedback(codecs.top_k(4))
    gradients = random_like(tree, (steps,))["w"]
    state, sent, seen = tx.init(tree), np.zeros(64), 0.0
    update = jax.jit(tx.update)
    for g in gradients:
        updates, state = update({"w": g}, state)
        sent += np.asarray(updates["w"], np.float64)
        residual = np.asarray(state.codec.residual, np.float64)
        seen = seen + np.abs(g) + np.abs(residual)
    bound = 2 * steps * 2.0**-24 * seen
    total = gradients.astype(np.float64).sum(axis=0)
    assert (np.abs(sent + residual - total) <= bound).all()


@pytest.mark.parametrize("bad", ["int8", None, 8])
def test_what_is_no_codec(bad):
    if bad is not None:
        message = r"`codec` must be a codec such as pj\.codecs\.int8\(\).*got "
        with pytest.raises(ValueError, match=message):
            transforms.compress(bad)
        with pytest.raises(ValueError, match=message):
            transforms.all_reduce_mean("data", codec=bad)
    with pytest.raises(ValueError, match=r"`codec` must be a codec without feedback"):
        transforms.error_feedback(bad)


def test_biased_without_feedback():
    with pytest.warns(UserWarning, match=r"Sign is biased: .*error_feedback\(codec\)"):
        transforms.compress(codecs.sign())
    with pytest.warns(UserWarning, match=r"Sign is biased: .*error_feedback\(codec\)"):
        transforms.all_reduce_mean("data", collectives.ring, codecs.sign())


def test_what_a_codec_cannot_encode_is_said_by_init():
    tx = transforms.error_feedback(codecs.top_k(102))
    with pytest.raises(ValueError, match=r"`k` must be at most the 101 elements"):
        tx.init(TREE)
