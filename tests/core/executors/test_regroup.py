"""Tests that a state moves to other groups without losing what they have changed."""

import functools

import jax
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax._core.executors import regrouped

from ...groups import batches, local_step, params


# Tests share local steps, and with them traced programs.
@functools.cache
def made(groups):
    return local_step(pj.data_mesh(groups), sync_every=3, overlap_steps=2)


def everywhere(tree, mesh):
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.device_put(jax.device_get(tree), place)


@pytest.mark.parametrize("steps", [0, 2, 4, 6])
def test_fewer_groups_begin_at_the_mean(steps):
    train, fewer = made(4), made(2)
    state = train.init(params())
    for batch in batches(steps):
        state, _ = train.step(state, batch)
    wanted, reports = train.drain(state)
    form = fewer.init(params()).shared.form
    held = state._replace(
        shared=everywhere(state.shared._replace(form=form), fewer.mesh),
        own=everywhere(state.own, fewer.mesh),
    )
    config, mesh = fewer.rounds.config, fewer.mesh
    found, others = regrouped(config, mesh, held, before=4)
    assert found.groups == 2
    assert tuple(found.position) == (0, 0, 0)
    assert len(others) == len(reports)
    for ours, theirs in zip(others, reports, strict=True):
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-6)
        np.testing.assert_allclose(ours.weight, theirs.weight)
    for name, leaf in wanted.params.items():
        np.testing.assert_allclose(found.params[name], leaf, rtol=1e-5, atol=1e-6)
        for group in found.local.trainable.params[name]:
            np.testing.assert_array_equal(group, found.params[name])
    fewer.step(found, batches(1)[0])


def test_frozen_parameters_are_not_moved_by_the_outer_optimizer():
    labels = dict.fromkeys(params(), "train") | {"bias": "freeze"}
    kinds = {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}
    settings = {"tx": optax.partition(kinds, labels), "sync_every": 3}
    settings["outer_tx"] = optax.adamw(0.1, weight_decay=0.5)
    train, fewer = (local_step(pj.data_mesh(n), **settings) for n in (4, 2))
    first = params() | {"bias": np.ones_like(params()["bias"])}
    state = train.init(first)
    for batch in batches(2):
        state, _ = train.step(state, batch)
    form = fewer.init(first).shared.form
    held = state._replace(
        shared=everywhere(state.shared._replace(form=form), fewer.mesh),
        own=everywhere(state.own, fewer.mesh),
    )
    found, _ = regrouped(fewer.rounds.config, fewer.mesh, held, before=4)
    np.testing.assert_array_equal(found.params["bias"], first["bias"])
    assert np.abs(found.params["up"] - first["up"]).min() > 0


def test_points_of_the_inner_optimizer_begin_as_far_from_the_anchor():
    """The outer optimizer moves the anchor by half of the mean difference."""
    settings = {"tx": optax.contrib.schedule_free_sgd(0.1), "sync_every": 3}
    settings["outer_tx"] = optax.sgd(0.5)
    train, fewer = (local_step(pj.data_mesh(n), **settings) for n in (4, 2))
    state = train.init(params())
    for batch in batches(2):
        state, _ = train.step(state, batch)
    form = fewer.init(params()).shared.form
    held = state._replace(
        shared=everywhere(state.shared._replace(form=form), fewer.mesh),
        own=everywhere(state.own, fewer.mesh),
    )
    found, _ = regrouped(fewer.rounds.config, fewer.mesh, held, before=4)
    before, after = state.local.trainable, found.local.trainable
    for name, anchor in found.params.items():
        gap = (before.params[name] - optax.tree.get(before.opt_state, "z")[name]).mean(
            0
        )
        now = anchor - optax.tree.get(after.opt_state, "z")[name][0]
        np.testing.assert_allclose(now, gap, rtol=1e-4, atol=1e-6)
