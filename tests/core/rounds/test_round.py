"""Tests local steps of all settings against local steps by hand."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj

from ...grid import grid
from ...helpers import (
    OPTIMIZERS,
    assert_bits_equal,
    batches,
    init_params,
    loss_fn,
)
from .by_hand import trained

SGD = optax.sgd(0.1)
OUTER = {"mean": optax.sgd(1.0), "nesterov": optax.sgd(0.7, 0.9, nesterov=True)}


# Tests share local steps, and with them traced programs.
made = functools.cache(pj.make_local_step)


def run(tx, groups, every, overlap, steps=17, outer_tx=None, **settings):
    train = made(
        loss_fn,
        tx,
        mesh=pj.data_mesh(groups),
        outer_tx=outer_tx,
        sync_every=every,
        overlap_steps=overlap,
        **settings,
    )
    data, infos = batches(steps, size=24), []
    state = train.init(init_params())
    for batch in data:
        state, info = train.step(state, batch)
        infos.append(info)
    return train, state, infos


ROUNDS = [(1, 0), (1, 1), (3, 0), (3, 1), (3, 3), (8, 0), (8, 1), (8, 3), (8, 8)]


# Both executors run all rounds, and all numbers of groups train with all optimizers.
@grid(
    1,
    form=itertools.product(["fused", "host"], ROUNDS),
    training=itertools.product(OPTIMIZERS, [6, 4, 2, 1]),
    outer=["nesterov", "mean"],
)
def test_groups_train_as_by_hand(form, training, outer):
    (executor, rounds), (tx, groups) = form, training
    every, overlap = rounds
    args = OPTIMIZERS[tx], groups, every, overlap
    _, state, _ = run(*args, outer_tx=OUTER[outer], executor=executor)
    anchor, local = trained(
        loss_fn,
        OPTIMIZERS[tx],
        OUTER[outer],
        init_params(),
        batches(17, size=24),
        *(rounds, groups),
    )
    found = jax.device_get(state.local.trainable.params)
    wanted = jax.tree.map(lambda *x: np.stack(x), *local)
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=3e-6)
    chex.assert_trees_all_close(state.params, anchor, rtol=1e-5, atol=3e-6)


POINTS = {
    "z": optax.contrib.schedule_free_sgd(0.1),
    "x0": optax.contrib.madgrad(0.05),
}


@grid(2, point=POINTS, rounds=[(4, 0), (4, 4), (3, 1)], executor=["fused", "host"])
def test_points_of_the_inner_optimizer_move_along(point, rounds, executor):
    tx, outer = POINTS[point], OUTER["nesterov"]
    _, state, _ = run(tx, 2, *rounds, outer_tx=outer, executor=executor)
    args = init_params(), batches(17, size=24), rounds, 2
    anchor, local = trained(loss_fn, tx, outer, *args, point=point)
    found = jax.device_get(state.local.trainable.params)
    wanted = jax.tree.map(lambda *x: np.stack(x), *local)
    chex.assert_trees_all_close(found, wanted, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(state.params, anchor, rtol=1e-4, atol=1e-5)


def test_rounds_of_one_step_are_synchronous_training():
    _, state, _ = run(SGD, 4, 1, 0)
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(4), width=1)
    wanted = train.init(init_params())
    for batch in batches(17, size=24):
        wanted, _ = train.step(wanted, batch)
    chex.assert_trees_all_close(state.params, wanted.params, rtol=1e-5, atol=3e-6)


@grid(1, steps=[3, 6, 7, 8, 9], executor=["fused", "host"])
def test_drained_groups_are_the_same_and_keep_all_progress(steps, executor):
    """With a mean outside, a drain gives the mean of what the groups have."""
    train, state, infos = run(SGD, 4, 3, 2, steps, executor=executor)
    wanted = jax.tree.map(lambda x: x.mean(0), state.local.trainable.params)
    drained, reports = train.drain(state)
    found = jax.device_get(drained.local.trainable.params)
    for leaf in jax.tree.leaves(found):
        assert (leaf == leaf[:1]).all()
    one = jax.tree.map(lambda x: x[0], found)
    chex.assert_trees_all_equal(one, jax.device_get(drained.params))
    chex.assert_trees_all_close(one, wanted, rtol=1e-5, atol=3e-6)
    own = np.stack([info.local_loss for info in infos])
    first = steps // 3 * 3 - 1  # reported beside the step after it
    (arrival,) = reports
    np.testing.assert_allclose(arrival.loss, own[first:].mean(), rtol=1e-5)
    again, nothing = train.drain(drained)
    assert not nothing
    chex.assert_trees_all_equal(again.params, drained.params)


@grid(1, rounds=[(3, 3), (4, 2), (3, 1), (2, 0)], tx=["adamw", "momentum"])
def test_both_executors_have_the_same_bits(rounds, tx):
    ends = []
    for executor in ("fused", "host"):
        settings = {"outer_tx": OUTER["nesterov"], "executor": executor}
        args = OPTIMIZERS[tx], 4, *rounds
        train, state, infos = run(*args, steps=11, **settings)
        drained, _ = train.drain(state)
        losses = [info.loss for info in infos]
        ends.append(jax.device_get((state.local, state.shared.anchor, drained, losses)))
    assert_bits_equal(*ends)


def test_loss_of_a_round_arrives_with_its_last_chunk():
    _, _, infos = run(OPTIMIZERS["adamw"], 4, 4, 2, steps=12)
    own = np.stack([info.local_loss for info in infos])
    assert own.shape == (12, 4)
    came = [bool(info.arrived) for info in infos]
    assert came == [i in (4, 8, 12) for i in range(1, 13)]
    for start, end in ((0, 3), (3, 7), (7, 11)):
        np.testing.assert_allclose(infos[end].loss, own[start:end].mean(), rtol=1e-5)
    assert np.isnan(infos[0].loss)
    assert infos[0].grad_norm.shape == (4,)


def test_group_skips_its_own_step_of_nan():
    train, state, _ = run(OPTIMIZERS["adamw"], 4, 4, 2, steps=5)
    (batch,) = batches(1, size=24, seed=3)
    batch["x"][:6] = np.nan  # the share of the first group
    before = jax.device_get(state.local.trainable.params)
    state, info = train.step(state, batch)
    assert info.applied.tolist() == [False, True, True, True]
    assert info.skipped.tolist() == [1, 0, 0, 0]
    after = jax.device_get(train.drain(state)[0].params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((before, after)))


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_drain_leaves_no_nan_in_the_next_report(executor):
    train, state, _ = run(SGD, 2, 3, 1, steps=4, executor=executor)
    (bad,) = batches(1, size=24, seed=3)
    bad["x"][0] = np.nan
    state, _ = train.step(state, bad)
    state, (report,) = train.drain(state)
    assert np.isnan(report.loss)
    for batch in batches(3, size=24):
        state, info = train.step(state, batch)
    assert info.arrived
    assert np.isfinite(info.loss)


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_chunk_with_nan_moves_no_group(executor):
    train, state, _ = run(SGD, 2, 4, 2, steps=4, executor=executor)
    trainable = state.local.trainable
    # The last element of the first group is in the last chunk.
    bad = trainable.params["out"].at[0, -1, -1].set(jnp.nan)
    trainable = trainable._replace(params=trainable.params | {"out": bad})
    local = state.local._replace(trainable=trainable)
    state = state._replace(own=state.own._replace(local=local))
    anchor, counts = state.shared.anchor, []
    for batch in batches(4, size=24, seed=3):
        state, info = train.step(state, batch)
        counts.append(int(info.refused))
    assert counts == [0, 0, 0, 1]
    moved = [
        bool(jnp.any(new["float32"] != old["float32"]))
        for new, old in zip(state.shared.anchor, anchor, strict=True)
    ]
    assert moved == [True, False]
    own = state.local.trainable.params
    assert all(np.isfinite(x[1]).all() for x in jax.tree.leaves(own))


@pytest.mark.full
def test_codec_with_feedback_reaches_the_same_loss():
    codec = pj.codecs.error_feedback(pj.codecs.int8())
    ends = {}
    for name, all_reduce in {
        "bits": pj.collectives.psum(),
        "int8": pj.collectives.two_shot(codec),
    }.items():
        train, state, _ = run(
            OPTIMIZERS["adamw"], 4, 4, 4, steps=40, all_reduce=all_reduce
        )
        params = train.drain(state)[0].params
        ends[name] = float(loss_fn(params, batches(1, size=64, seed=9)[0]))
    assert ends["int8"] == pytest.approx(ends["bits"], rel=0.01)


@grid(1, executor=["fused", "host"], rounds=[(3, 3), (4, 2)])
def test_donated_states_are_overwritten_and_end_with_the_same_bits(executor, rounds):
    settings = {"executor": executor, "steps": 9}
    tx = OPTIMIZERS["adamw"]
    _, wanted, reports = run(tx, 4, *rounds, **settings)
    train, found, infos = run(tx, 4, *rounds, donate=True, **settings)
    assert_bits_equal(*jax.device_get([(x.shared, x.own) for x in (found, wanted)]))
    assert_bits_equal(*jax.device_get((infos, reports)))  # no step overwrites them
    train.join()
    train.step(found, batches(1, size=24)[0])
    assert all(x.is_deleted() for x in jax.tree.leaves(found.local.trainable.params))
    # Of the anchor, only the chunk beside the step is overwritten.
    gone = [chunk["float32"].is_deleted() for chunk in found.shared.anchor]
    number = train.rounds.config.schedule.chunk_at(int(found.position.taken))
    assert gone == [i == number for i in range(len(gone))]


@grid(0, executor=["host", "fused"], rounds=[(3, 3), (3, 0)])
def test_donated_points_of_an_optimizer_end_with_the_same_bits(executor, rounds):
    tx, settings = optax.contrib.schedule_free_sgd(0.1), {"executor": executor}
    _, wanted, _ = run(tx, 4, *rounds, steps=7, **settings)
    _, found, _ = run(tx, 4, *rounds, steps=7, donate=True, **settings)
    assert_bits_equal(*jax.device_get([(x.shared, x.own) for x in (found, wanted)]))


def test_outer_optimizer_has_no_update_before_the_first_progress():
    """In a round that is always under way, the first chunk would have one more."""
    counts = optax.sgd(lambda number: jnp.where(number < 1, 1.0, 0.0))
    train = pj.make_local_step(
        lambda w, batch: jnp.mean((w[None] - batch) ** 2),
        optax.sgd(0.5),
        mesh=pj.data_mesh(2),
        sync_every=2,
        outer_tx=counts,
    )
    state, batch = train.init(jnp.zeros(4)), np.ones((4, 4), np.float32)
    for _ in range(3):
        state, _ = train.step(state, batch)
    assert (np.asarray(state.params) > 0).all()


def test_drain_takes_points_along_if_a_chunk_is_refused():
    """Progress that is not finite is left out, of the points, too."""
    tx = optax.contrib.schedule_free(optax.sgd(0.5), 0.5, b1=0.9)
    train = pj.make_local_step(
        lambda w, batch: jnp.mean((w[None] - batch) ** 2),
        tx,
        mesh=pj.data_mesh(2),
        sync_every=8,
        overlap_steps=1,
        skip_nonfinite=False,
    )
    batch = np.ones((2, 2), np.float32)
    state, _ = train.step(train.init(jnp.zeros(2)), batch)
    batch[1] = np.inf
    state, _ = train.step(state, batch)

    def ahead(state):
        trained = state.local.trainable
        return np.asarray(trained.opt_state.z[0] - trained.params[0])

    drained, _ = train.drain(state)
    assert (np.asarray(state.local.trainable.params[0]) > 0).all()
    assert not np.asarray(drained.local.trainable.params[0]).any()
    np.testing.assert_allclose(ahead(drained), ahead(state), atol=1e-6)


def test_outer_state_keeps_its_dtype_under_float16():
    """Sums of float16 arrive in float32."""
    train = pj.make_local_step(
        lambda w, batch: jnp.vdot(w.astype(jnp.float32), batch.mean(0)),
        optax.sgd(0.1),
        mesh=pj.data_mesh(2),
        sync_every=2,
        outer_tx=optax.sgd(0.7, momentum=0.9),
    )
    state = train.init(jnp.zeros(2, jnp.float16))
    before = jax.tree.map(lambda x: x.dtype, state.shared)
    for _ in range(3):
        state, _ = train.step(state, np.ones((4, 2), np.float32))
    assert jax.tree.map(lambda x: x.dtype, state.shared) == before
    assert np.isfinite(state.params).all()
