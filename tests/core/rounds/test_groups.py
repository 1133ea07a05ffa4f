"""Tests local steps of groups of several devices against groups of one."""

import functools

import chex
import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax.codecs import error_feedback, int8
from pipejax.collectives import psum, two_shot

from ...grid import grid
from ...groups import SPLITS, batches, loss_fn, mesh_of, params, placed
from ...helpers import OPTIMIZERS, assert_bits_equal
from .by_hand import chunk_of, trained

NESTEROV = optax.sgd(0.7, 0.9, nesterov=True)


# Tests share local steps, and with them traced programs.
@functools.cache
def made(mesh, tx=OPTIMIZERS["adamw"], **settings):
    settings = {"sync_every": 3, "overlap_steps": 2, "outer_tx": NESTEROV} | settings
    return pj.make_local_step(loss_fn, tx, mesh=mesh, axis_name="host", **settings)


def run(name, groups=2, steps=8, kind=AxisType.Auto, **settings):
    mesh = mesh_of(groups, name, kind)
    train = made(mesh, **settings)
    state = train.init(placed(mesh, name))
    for batch in batches(steps):
        given = train.batch(batch, axis_name=("host", SPLITS[name][0][0]))
        state, _ = train.step(state, given)
    return train, state


def chunks_of(name, count):
    """Returns for each element in which chunk it is: a slice of every shard."""
    mesh, (inner, split) = mesh_of(1, name), SPLITS[name]

    def chunks(key, x):
        found, spec = np.zeros(x.shape, int), split.get(key, P())
        shards = NamedSharding(mesh, spec).devices_indices_map(x.shape).values()
        places = {str(place): place for place in shards}.values()
        for place in places:
            found[place] = chunk_of(found[place], count, 2 ** len(inner) // len(places))
        return found

    return {key: chunks(key, x) for key, x in params().items()}


FULL = pytest.mark.full


@grid(
    1,
    executor=["fused", "host"],
    name=SPLITS,
    rounds=[(1, 0), (3, 0), (3, 1), (3, 3), (8, 5)],
    tx=["adamw", "clip+adamw", "momentum"],
    settings=[{}, {"microbatches": 2}],
)
def test_groups_of_several_devices_train_as_by_hand(
    executor, name, rounds, tx, settings
):
    every, overlap = rounds
    form = {"sync_every": every, "overlap_steps": overlap, "executor": executor}
    chunks = chunks_of(name, max(1, overlap))
    _, state = run(name, tx=OPTIMIZERS[tx], **form, **settings)
    anchor, local = trained(
        loss_fn, OPTIMIZERS[tx], NESTEROV, params(), batches(8), rounds, 2, chunks
    )
    found = jax.device_get(state.local.trainable.params)
    wanted = jax.tree.map(lambda *x: np.stack(x), *local)
    chex.assert_trees_all_close(found, wanted, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(state.params, anchor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SPLITS)
def test_state_is_split_inside_groups(name):
    """The anchor and the outer state are divided without copies."""
    _, state = run(name)
    inner, split = SPLITS[name]
    names = inner[0] if len(inner) == 1 else inner
    for chunk in state.shared.anchor:
        assert chunk["float32"].sharding.spec == P(inner)
    for outer in state.shared.outer:
        assert outer[0].trace["float32"].sharding.spec in (P(inner), P(names))
    for key, leaf in state.local.trainable.params.items():
        assert leaf.sharding.spec == P("host", *split.get(key, ()))
        mu = state.local.trainable.opt_state[0].mu[key]
        assert mu.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
    for key, leaf in state.params.items():
        assert leaf.sharding.spec == split.get(key, P())
    elements = sum(x.size for x in params().values())
    devices = 2 ** len(inner)
    leaves = jax.tree.leaves(state.shared.anchor)
    held = sum(leaf.addressable_data(0).size for leaf in leaves)
    # Of each array, a chunk lacks less than an element.
    padding = len(params()) * len(state.shared.anchor)
    assert elements / devices <= held <= elements / devices + padding


@grid(1, name=SPLITS, coded=[False, True], rounds=[(3, 3), (4, 1)])
def test_both_executors_have_the_same_bits(name, coded, rounds):
    codec = error_feedback(int8(8))
    settings = {
        "sync_every": rounds[0],
        "overlap_steps": rounds[1],
        "all_reduce": two_shot(codec) if coded else psum(),
    }
    ends = []
    for executor in ("fused", "host"):
        train, state = run(name, executor=executor, **settings)
        drained, _ = train.drain(state)
        own = state.own._replace(codec_states=())
        ends.append(jax.device_get((state.shared, own, drained.shared, drained.params)))
    assert_bits_equal(*ends)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["fsdp", *(pytest.param(name, marks=FULL) for name in SPLITS if name != "fsdp")],
)
def test_codec_keeps_its_residual_on_every_device(name):
    codec = error_feedback(int8(8))
    train, state = run(name, all_reduce=two_shot(codec), steps=24)
    exact, wanted = run(name, steps=24)
    ends = [each.drain(x)[0].params for each, x in ((train, state), (exact, wanted))]
    chex.assert_trees_all_close(*ends, rtol=0.1, atol=0.05)
    residuals = jax.tree.leaves(state.own.codec_states)
    assert any(bool((leaf != 0).any()) for leaf in residuals)
    for leaf in residuals:
        assert len(leaf.sharding.device_set) == train.mesh.size


@grid(1, executor=["fused", "host"], name=SPLITS)
def test_abstract_state_is_the_form_of_the_first(executor, name):
    mesh = mesh_of(2, name)
    train = pj.make_local_step(
        loss_fn,
        optax.adamw(1e-2),
        mesh=mesh,
        axis_name="host",
        outer_tx=NESTEROV,
        all_reduce=two_shot(error_feedback(int8(8))),
        executor=executor,
    )
    given = placed(mesh, name)
    state, shapes = train.init(given), train.abstract_state(given)
    assert jax.tree.structure(state) == jax.tree.structure(shapes)
    arrays = jax.tree.leaves((state.shared, state.own))
    forms = jax.tree.leaves((shapes.shared, shapes.own))
    for array, form in zip(arrays, forms, strict=True):
        assert (array.shape, array.dtype) == (form.shape, form.dtype)
        assert array.sharding.is_equivalent_to(form.sharding, array.ndim)


def test_groups_on_axes_of_type_explicit_end_alike():
    (_, plain), (train, typed) = run("copies"), run("copies", kind=AxisType.Explicit)
    assert_bits_equal(*jax.device_get([plain.local, typed.local]))
    assert_bits_equal(*jax.device_get([plain.params, typed.params]))
    with jax.set_mesh(train.mesh):
        assert jax.typeof(typed.params["up"]).sharding.mesh.are_all_axes_explicit


def test_groups_skip_a_step_with_nan_together():
    train, state = run("fsdp")
    (batch,) = batches(1)
    batch["x"][0] = np.nan  # on the first device of the first group
    state, info = train.step(state, train.batch(batch, axis_name=("host", "fsdp")))
    assert info.applied.tolist() == [False, True]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.local.trainable))
