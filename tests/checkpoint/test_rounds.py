"""Tests that local steps continue from a checkpoint inside a round."""

import functools
import logging

import jax
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import checkpoint
from pipejax.codecs import error_feedback, int8
from pipejax.collectives import psum, two_shot

from ..grid import grid
from ..groups import SPLITS, batches, local_step, loss_fn, mesh_of, params, placed
from ..helpers import assert_bits_equal
from .helpers import init, train_step

FEEDBACK = two_shot(error_feedback(int8(8)))


def new(name="fsdp", groups=2, **settings):
    mesh = mesh_of(groups, name)
    settings = {"sync_every": 4, "overlap_steps": 3} | settings
    train = local_step(mesh, outer_tx=optax.sgd(0.7, momentum=0.9), **settings)
    return train, placed(mesh, name)


# Tests share local steps, and with them traced programs.
made = functools.cache(new)


def run(train, state, steps, first=0):
    names = train.mesh.axis_names[:2]
    for batch in batches(first + steps)[first:]:
        state, _ = train.step(state, train.batch(batch, axis_name=names))
    return state


def saved(folder, train, state, extras=None):
    train.join()
    with checkpoint.manager(folder) as manager:
        checkpoint.save(manager, state, extras)


def restored(folder, train, params):
    with checkpoint.manager(folder, read_only=True) as manager:
        return checkpoint.restore(manager, train, train.abstract_state(params))


@grid(
    1,
    steps=[2, 4, 5, 6, 7],
    executor=["fused", "host"],
    name=SPLITS,
    all_reduce=[FEEDBACK, psum()],
)
def test_run_continues_with_the_same_bits(tmp_path, steps, executor, name, all_reduce):
    train, params = made(name, executor=executor, all_reduce=all_reduce)
    state = run(train, train.init(params), steps)
    saved(tmp_path, train, state, {"next": steps})
    found = restored(tmp_path, train, params)
    assert (found.extras, found.drained, found.infos) == ({"next": steps}, False, ())
    assert found.state.position == state.position
    ends = [run(train, each, 5, first=steps) for each in (found.state, state)]
    assert_bits_equal(*jax.device_get([(end.shared, end.own) for end in ends]))


@pytest.mark.full  # in the quick run, tests/core/executors/test_regroup.py
@pytest.mark.parametrize(
    ("steps", "name", "groups"),
    [
        (6, "fsdp", 4),
        *(
            (steps, name, groups)
            for steps in (2, 4, 8, 9)
            for name in ("fsdp", "copies")
            for groups in (1, 4)
        ),
    ],
)
def test_other_groups_continue_from_a_drain(tmp_path, steps, name, groups, caplog):
    train, params = made(name, all_reduce=FEEDBACK)
    state = run(train, train.init(params), steps)
    saved(tmp_path, train, state)
    other, params = made(name, groups, all_reduce=FEEDBACK)
    with caplog.at_level(logging.WARNING):
        found = restored(tmp_path, other, params)
    assert "residuals of error feedback start from zero" in caplog.text
    assert "checkpoint of 2 groups restored on" in caplog.text
    assert found.drained
    # The exact twin: groups that exchange without a codec.
    exact, _ = made(name)
    empty = exact.init(placed(exact.mesh, name)).own.codec_states
    drained, reports = exact.drain(
        state._replace(own=state.own._replace(codec_states=empty))
    )
    pairs = zip(found.infos, reports, strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-6)
    close(found.state.params, drained.params)
    close(found.state.shared.outer, drained.shared.outer)
    moments = jax.tree.map(lambda x: x.mean(0), state.local.trainable.opt_state[0].mu)
    close(found.state.local.trainable.opt_state[0].mu, moments)
    counts = found.state.local.trainable.opt_state[0].count
    assert counts.tolist() == [steps] * groups
    state = run(other, found.state, 5, first=steps)
    assert state.groups == groups
    assert np.isfinite(jax.tree.leaves(other.drain(state)[0].params)[0]).all()


def close(found, wanted):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for ours, theirs in pairs:
        ours = np.asarray(ours)
        for each in ours if ours.ndim > theirs.ndim else [ours]:
            np.testing.assert_allclose(each, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlap_steps": 2}, r"chunks, as `overlap_steps` says, of 3, .* got 2"),
        ({"name": "copies"}, "inner axes of .*fsdp.* got .*device"),
    ],
)
def test_other_rounds_are_refused(tmp_path, settings, message):
    train, params = made()
    saved(tmp_path, train, run(train, train.init(params), 7))
    with pytest.raises(ValueError, match=message):
        restored(tmp_path, *made(**settings))


@grid(1, groups=[2, 4], rounds=[(3, 3), (6, 3), (2, 0)])
def test_timed_rounds_are_restored(tmp_path, groups, rounds):
    """A step that times its rounds takes those of the checkpoint."""
    every, overlap = rounds
    train, params = made(sync_every=every, overlap_steps=overlap)
    state = run(train, train.init(params), 7)
    saved(tmp_path, train, state)
    timed, params = new(groups=groups, sync_every="auto", overlap_steps=None)
    found = restored(tmp_path, timed, params)
    assert found.state.shared.form.schedule == train.rounds.config.schedule
    wanted = state if groups == 2 else train.drain(state)[0]
    close(found.state.params, wanted.params)
    if groups == 2:
        ends = [
            run(each, begun, 5, first=7)
            for each, begun in ((timed, found.state), (train, state))
        ]
        assert_bits_equal(*jax.device_get([(end.shared, end.own) for end in ends]))


def test_other_form_is_refused(tmp_path):
    train, params = made()
    saved(tmp_path, train, train.init(params))
    rounds = {"sync_every": 4, "overlap_steps": 3}
    other = local_step(train.mesh, tx=optax.sgd(0.1), **rounds)
    with pytest.raises(ValueError, match="`like` must have the form of the checkpoint"):
        restored(tmp_path, other, params)


def test_state_of_a_pipeline_is_refused_by_local_steps_and_back(tmp_path):
    (local, params), train = made(), train_step(2)
    saved(tmp_path / "local", local, local.init(params))
    saved(tmp_path / "pipeline", train, init(train))
    with (
        checkpoint.manager(tmp_path / "local", read_only=True) as manager,
        pytest.raises(ValueError, match=r"`train` must be made by pj.make_local_step"),
    ):
        checkpoint.restore(manager, train, init(train))
    with pytest.raises(ValueError, match=r"`train` must be made by pj.make_train_step"):
        restored(tmp_path / "pipeline", local, params)


def test_like_of_another_kind_is_refused(tmp_path):
    (train, params), (other, wider) = made(), made(groups=4)
    saved(tmp_path, train, train.init(params))
    with checkpoint.manager(tmp_path, read_only=True) as manager:
        with pytest.raises(ValueError, match=r"`like` must be a pj.LocalState"):
            checkpoint.restore(manager, train, init(train_step(2)))
        with pytest.raises(ValueError, match="with groups 2; got groups 4"):
            checkpoint.restore(manager, train, other.abstract_state(wider))


@pytest.mark.parametrize("given", [FEEDBACK, psum()])
def test_other_codec_is_refused(tmp_path, given):
    train, params = made(all_reduce=given)
    saved(tmp_path, train, train.init(params))
    other = psum() if given is FEEDBACK else FEEDBACK
    with pytest.raises(ValueError, match="codec_states"):
        restored(tmp_path, *made(all_reduce=other))


def test_renamed_axis_keeps_residuals(tmp_path):
    def of(axis):
        mesh, rounds = pj.data_mesh(2, axis_name=axis), {"sync_every": 2}
        return local_step(mesh, overlap_steps=1, all_reduce=FEEDBACK, **rounds)

    train, other = of("data"), of("host")
    state = train.init(params())
    for batch in batches(5):
        state, _ = train.step(state, batch)
    saved(tmp_path, train, state)
    found = restored(tmp_path, other, params()).state
    assert_bits_equal(*jax.device_get([x.own.codec_states for x in (found, state)]))
    assert any(leaf.any() for leaf in jax.tree.leaves(found.own.codec_states))


@pytest.mark.parametrize("groups", [2, 4])
def test_drained_state_continues_with_another_loss(tmp_path, groups):
    def counted(params, batch):
        return loss_fn(params, batch), pj.Aux({"seen": batch["x"].sum()})

    def of(loss, groups):
        mesh, rounds = pj.data_mesh(groups), {"sync_every": 2, "overlap_steps": 1}
        return local_step(mesh, loss=loss, **rounds)

    train, other = of(counted, 2), of(loss_fn, groups)
    state = train.init(params(), batch=batches(1)[0])
    for batch in batches(3):
        state, _ = train.step(state, batch)
    saved(tmp_path / "within", train, state)
    with pytest.raises(ValueError, match=r"in flight.*seen.*drained.*batch=batch"):
        restored(tmp_path / "within", other, params())
    saved(tmp_path / "drained", train, train.drain(state)[0])
    found = restored(tmp_path / "drained", other, params()).state
    for batch in batches(4):
        found, info = other.step(found, batch)
    assert np.isfinite(info.local_loss).all()


@pytest.mark.parametrize(
    ("tx", "outer_tx", "message"),
    [
        (optax.sgd(0.1), optax.sgd(0.7, momentum=0.9), "`opt_state"),
        (optax.adamw(1e-2), optax.adam(0.1), "`shared.outer"),
    ],
)
def test_like_of_another_optimizer_is_refused(tmp_path, tx, outer_tx, message):
    train, given = made()
    state = train.init(given)
    saved(tmp_path, train, state)
    rounds = {"sync_every": 4, "overlap_steps": 3}
    other = local_step(train.mesh, tx=tx, outer_tx=outer_tx, **rounds)
    with (
        checkpoint.manager(tmp_path, read_only=True) as manager,
        pytest.raises(ValueError, match=message),
    ):
        checkpoint.restore(manager, other, state)
