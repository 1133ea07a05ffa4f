"""Tests the line that turns a user's data-parallel loop into Pipe-SGD."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import PartitionSpec as P

import pipejax as pj

from ..grid import grid
from ..helpers import assert_bits_equal, batches
from ..reference import split
from .flax_loop import (
    DEVICES,
    NET,
    STEPS,
    Loop,
    assert_close,
    chained,
    expected,
    init_params,
    loss_fn,
)


@grid(1, width=[1, 2, 3, 4], check_vma=[False, True])
def test_shard_map_loop_equals_make_train_step(width, check_vma):
    """Gradients of zero drain the pipeline, because SGD does nothing with them."""
    loop = Loop(chained(width, optax.sgd(0.1)), check_vma=check_vma)
    states = loop.run(width)
    assert_bits_equal([s.params for s in states], expected(width))
    assert int(states[-1].step) == STEPS + width - 1


@pytest.mark.parametrize("width", [1, 2, 3])
def test_pmap_loop_equals_make_train_step(width):
    devices = jax.devices()[:DEVICES]

    @functools.partial(jax.pmap, axis_name="data", devices=devices)
    def step(state, batch):
        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params, batch))

    state = TrainState.create(
        apply_fn=NET.apply, params=init_params(), tx=chained(width, optax.sgd(0.1))
    )
    state = jax_utils.replicate(state, devices=devices)
    for batch, after in zip(batches(STEPS), expected(width), strict=False):
        shares = jax.tree.map(lambda *xs: np.stack(xs), *split(batch, DEVICES))
        state = step(state, shares)
        for i in range(DEVICES):
            replica = jax.tree.map(lambda x, i=i: x[i], state.params)
            assert_bits_equal(replica, after)


def test_momentum_needs_no_mask():
    """A zero gradient keeps a momentum of zero, as in the README's loop."""
    width, tx = 2, optax.sgd(0.1, momentum=0.9)
    states = Loop(chained(width, tx)).run(width)
    assert_close([s.params for s in states[:STEPS]], expected(width, tx)[:STEPS])


@pytest.mark.parametrize("width", [pytest.param(2, marks=pytest.mark.full), 3])
def test_conditionally_mask_holds_adamw_still_at_the_start(width):
    tx = optax.adamw(1e-2, weight_decay=0.1)
    held = optax.conditionally_mask(tx, lambda step: step >= width - 1)
    states = Loop(chained(width, held)).run(width, STEPS)
    fresh = tx.init(jax.tree.map(jnp.asarray, init_params()))
    for state in states[: width - 1]:
        assert_bits_equal(state.params, init_params())
        assert_bits_equal(state.opt_state[1].inner_state, fresh)
    assert int(states[width - 1].opt_state[1].inner_state[0].count) == 1
    assert_close([s.params for s in states], expected(width, tx))

    # Without the mask, weights decay before any gradient has arrived.
    first = Loop(chained(width, tx)).run(width, 1)[0]
    assert int(first.opt_state[1][0].count) == 1
    kernel = first.params["Dense_0"]["kernel"]
    assert not np.array_equal(kernel, init_params()["Dense_0"]["kernel"])


def delayed(tx, gradients, *, run=None):
    """Returns the updates of `tx` for gradients [steps, devices, ...], in shard_map.

    `tx` gets device i's gradients[t, i] in step t. `run(step, state, xs)` runs the
    steps.
    """
    mesh = pj.data_mesh(jax.tree.leaves(gradients)[0].shape[1])
    like = jax.tree.map(lambda g: jnp.zeros_like(g[0, 0]), gradients)
    specs = pj.state_specs(jax.eval_shape(tx.init, like))
    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

    def local(state, gradient):
        mine = jax.tree.map(lambda g: g[0], gradient)
        updates, state = tx.update(mine, state)
        return state, jax.tree.map(lambda u: u[None], updates)

    step = mapped(local, in_specs=(specs, P("data")), out_specs=(specs, P("data")))
    state = jax.jit(mapped(lambda: tx.init(like), in_specs=(), out_specs=specs))()
    return (run or loop)(step, state, gradients)


def loop(step, state, xs):
    step, out = jax.jit(step), []
    for t in range(len(jax.tree.leaves(xs)[0])):
        state, updates = step(state, jax.tree.map(lambda x, t=t: x[t], xs))
        out.append(updates)
    return jax.tree.map(lambda *us: np.stack(us), *out)


def rank_coded(devices, steps=5, shape=(3,)):
    """Device i sends i + 1 in step 0, twice as much in step 1, and so on."""
    codes = np.outer(2.0 ** np.arange(steps), np.arange(1, devices + 1))
    return np.broadcast_to(
        codes.astype(np.float32).reshape(steps, devices, *(1 for _ in shape)),
        (steps, devices, *shape),
    )


def means(gradients, width):
    """Returns the mean over devices, `width - 1` steps late, by definition."""
    mean = gradients.astype(np.float32).mean(axis=1, keepdims=True)
    late = np.concatenate([np.zeros_like(mean[: width - 1]), mean])[: len(mean)]
    return np.broadcast_to(late, gradients.shape).astype(gradients.dtype)


@grid(1, width=[2, 4, 1], devices=[4, 8, 2, 1])
def test_rank_coded_gradients_give_their_delayed_means(width, devices):
    gradients = rank_coded(devices)
    got = delayed(pj.pipelined_mean("data", width=width), gradients)
    np.testing.assert_array_equal(got, means(gradients, width), strict=True)


def scanned(step, state, xs):
    return jax.jit(functools.partial(lax.scan, step))(state, xs)[1]


def test_scan_gives_the_same_delayed_means():
    gradients = rank_coded(4)
    got = delayed(pj.pipelined_mean("data", width=3), gradients, run=scanned)
    np.testing.assert_array_equal(got, means(gradients, 3))


def test_eval_shape_gives_the_shapes_of_state_and_updates():
    gradients = rank_coded(4)

    def shapes(step, state, xs):
        return jax.eval_shape(step, state, jax.tree.map(lambda x: x[0], xs))

    state, updates = delayed(pj.pipelined_mean("data"), gradients, run=shapes)
    assert state.pending[-1].gradients.shape == (4 * 3,)
    assert updates.shape == gradients[0].shape


def test_masked_leaves_are_left_alone():
    gradients = {"mean": rank_coded(4), "own": rank_coded(4)}
    tx = optax.masked(pj.pipelined_mean("data"), {"mean": True, "own": False})
    got = delayed(tx, gradients)
    np.testing.assert_array_equal(got["mean"], means(gradients["mean"], 2))
    np.testing.assert_array_equal(got["own"], gradients["own"])


def all_reduces(step, state, xs):
    text = jax.jit(step).lower(state, jax.tree.map(lambda x: x[0], xs)).as_text()
    return text.count("stablehlo.all_reduce")


def test_each_gradient_travels_in_its_own_shape_and_dtype():
    coded = rank_coded(4, shape=(2, 2))
    gradients = {
        "a": coded,
        "b": rank_coded(4).astype(jnp.bfloat16),
        "c": -coded[..., 0],
        "d": -rank_coded(4, shape=()).astype(jnp.bfloat16),
    }
    tx = pj.pipelined_mean("data", width=2)
    got = delayed(tx, gradients)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(got[name], means(gradient, 2), strict=True)
    assert delayed(tx, gradients, run=all_reduces) == len(gradients)
    state = tx.init(jax.tree.map(lambda g: g[0, 0], gradients))
    pending = state.pending[0].gradients
    assert {k: (x.shape, x.dtype.name) for k, x in pending.items()} == {
        "a": ((2, 2), "float32"),
        "b": ((3,), "bfloat16"),
        "c": ((2,), "float32"),
        "d": ((1,), "bfloat16"),
    }


@pytest.mark.parametrize("width", [1, 2, 3])
def test_reduce_dtype_rounds_only_the_message(width):
    rng = np.random.default_rng(0)
    gradients = {
        "a": rng.normal(size=(5, 4, 7)).astype(np.float32),
        "b": rng.normal(size=(5, 4, 2)).astype(np.float32).astype(jnp.bfloat16),
    }
    tx = pj.pipelined_mean("data", width=width, reduce_dtype=jnp.bfloat16)
    got = delayed(tx, gradients)
    assert delayed(tx, gradients, run=all_reduces) == len(gradients)

    def by_hand(updates, state, params=None):
        """Sums in bfloat16, and divides in the leaf's own dtype."""
        total = jax.tree.map(
            lambda g: lax.psum(g.astype(jnp.bfloat16), "data").astype(g.dtype), updates
        )
        return jax.tree.map(lambda g: g / 4, total), state

    twin = optax.GradientTransformation(lambda params: (), by_hand)
    wanted = jax.tree.map(
        lambda u: np.concatenate([np.zeros_like(u[: width - 1]), u])[: len(u)],
        delayed(twin, gradients),
    )
    assert_bits_equal(got, wanted)
    assert got["a"].dtype == np.float32


def test_update_is_traced_exactly_once():
    traced = []
    tx = pj.pipelined_mean("data", width=2)

    def update(updates, state, params=None):
        traced.append(1)
        return tx.update(updates, state, params)

    delayed(optax.GradientTransformation(tx.init, update), rank_coded(4))
    assert len(traced) == 1
