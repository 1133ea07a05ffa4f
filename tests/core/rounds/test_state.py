"""Tests what a state says of all groups, and of each group."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import pipejax as pj

from ...groups import (
    SPLITS,
    batches,
    local_step,
    loss_fn,
    mesh_of,
    params,
    placed,
)


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


def test_number_of_steps_is_read_without_other_groups(monkeypatch):
    """A process may read it alone."""
    mesh = pj.data_mesh(2)
    train = local_step(mesh)
    state = train.init(params())
    for batch in batches(3):
        state, _ = train.step(state, batch)
    monkeypatch.setattr(type(state.shared.form), "mean", None)
    assert state.step == 3
    assert state.step.sharding.is_fully_replicated
    assert state.step.sharding.device_set == set(mesh.devices.flat)


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
