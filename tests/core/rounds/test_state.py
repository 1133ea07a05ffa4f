"""Tests that a state knows the form of its parameters."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.rounds import Form, Shared
from pipejax._core.step import Common, Trainable
from pipejax._internal.mesh import on_mesh
from pipejax._internal.round_schedule import RoundSchedule
from pipejax._internal.shards import Shards

from ...groups import (
    SPLITS,
    batches,
    local_step,
    loss_fn,
    mesh_of,
    params,
    placed,
)

PARAMS = {"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float32)}


def form_of(params, mesh=None, name="data", specs=()):
    trained = Trainable(params, None, shards=Shards(params=specs))
    common = Common(trained, None, None, None, None)
    return Form.of(common, None, mesh or pj.data_mesh(2), name, RoundSchedule(3, 3))


def test_anchor_has_the_shapes_of_the_parameters():
    form = form_of(PARAMS)
    anchor = form.chunked(PARAMS)
    outer = tuple(map(optax.sgd(1.0).init, anchor))
    shared = Shared(anchor, outer, None, np.int32(0), form)
    assert jax.tree.map(np.shape, shared.params) == {"a": (2, 3), "b": (4,)}
    assert shared.params["a"].tolist() == PARAMS["a"].tolist()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", SPLITS)
def test_shapes_of_a_state_have_its_properties(name, kind):
    mesh = mesh_of(2, name, kind)
    train, given = local_step(mesh), placed(mesh, name)
    shapes, state = train.abstract_state(given), train.init(given)
    for found, wanted in (
        (shapes.params, state.params),
        (shapes.opt_state, state.opt_state),
        (shapes.step, state.step),
    ):
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
        for form, leaf in pairs:
            assert (form.shape, form.dtype) == (leaf.shape, leaf.dtype)
            assert form.sharding == leaf.sharding


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, AxisType.Auto) for name in (None, *SPLITS)),
        ("copies", AxisType.Explicit),
    ],
)
def test_optimizer_state_is_the_mean_of_the_groups(name, kind):
    mesh = pj.data_mesh(2) if name is None else mesh_of(2, name, kind)
    given = params() if name is None else placed(mesh, name)
    train = local_step(mesh, sync_every=3)
    state = train.init(given)
    names = mesh.axis_names[:2]
    for batch in batches(4):
        state, _ = train.step(state, train.batch(batch, axis_name=names))
    found, own = state.opt_state[0], state.local.trainable.opt_state[0]
    assert state.step == found.count == 4
    for key, leaf in state.params.items():
        # A mean of two groups has a single rounding.
        wanted = np.mean(np.asarray(own.mu[key], np.float64), 0)
        np.testing.assert_array_equal(found.mu[key], wanted.astype(np.float32))
        assert found.mu[key].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        if name is not None:
            assert found.mu[key].sharding.mesh == leaf.sharding.mesh == mesh


def test_optimizer_state_of_a_donated_state_is_refused():
    train = local_step(pj.data_mesh(2), donate=True)
    state, (batch,) = train.init(params()), batches(1)
    train.step(state, batch)
    for name in ("opt_state", "step"):
        with pytest.raises(ValueError, match="`state` must not have been donated"):
            getattr(state, name)


def test_synchronous_training_goes_on_from_local_steps():
    mesh, data = pj.data_mesh(2), batches(6)
    train = local_step(mesh, tx=optax.adamw(1e-2), sync_every=2)
    plain = pj.make_train_step(loss_fn, optax.adamw(1e-2), mesh=mesh, width=1)
    state = train.init(params())
    for batch in data[:4]:
        state, _ = train.step(state, batch)
    state, _ = train.drain(state)
    after = plain.init(state.params, opt_state=state.opt_state)
    for batch in data[4:]:
        after, info = plain.step(after, batch)
    assert int(after.opt_state[0].count) == 6
    assert np.isfinite(info.loss)


def test_forms_are_equal_if_shapes_and_dtypes_are():
    other = PARAMS | {"b": np.zeros(4, np.float16)}
    assert form_of(PARAMS) == form_of(jax.tree.map(np.copy, PARAMS))
    assert form_of(PARAMS) != form_of(other)
    assert len({form_of(PARAMS), form_of(PARAMS), form_of(other)}) == 2


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", SPLITS)
def test_parameters_of_groups_come_back_with_their_sharding(name, kind):
    mesh, (inner, split) = mesh_of(2, name, kind), SPLITS[name]
    given = placed(mesh, name)
    specs = tuple(split.get(key, P()) for key in sorted(given))
    form = form_of(given, mesh, "host", specs)
    program = on_mesh(lambda tree: form.chunked(tree), mesh, P(), P(), "host")
    chunks = jax.jit(program)(given)
    for chunk in chunks:  # every element is in the chunks once
        assert chunk["float32"].sharding.spec == P(inner)
    held = np.concatenate([np.asarray(chunk["float32"]) for chunk in chunks])
    wanted = np.concatenate([leaf.ravel() for leaf in params().values()])
    assert np.sort(held[held != 0]).tolist() == np.sort(wanted[wanted != 0]).tolist()
    for key, leaf in form.params(chunks).items():
        assert np.array_equal(leaf, params()[key])
        assert leaf.sharding == given[key].sharding
