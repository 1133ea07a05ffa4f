"""Tests that groups agree on a model state in every round."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import checkpoint
from pipejax._core.message import Message, Reduced
from pipejax._core.rounds import Form, agreed_on, at_agreed, changes_of
from pipejax._core.step import Common, Trainable
from pipejax._internal.round_schedule import RoundSchedule

from ...grid import grid
from ...groups import batches, loss_fn, params
from .by_hand import shares

OWN = {
    "mean": jnp.array([5.0, 1.0]),
    "count": jnp.int32(7),
    "mask": jnp.float32(-jnp.inf),
}
AGREED = {"mean": jnp.array([2.0, 2.0]), "count": jnp.int32(4), "mask": OWN["mask"]}


def form():
    common = Common(Trainable(jnp.zeros(2), None), OWN, None, None, None)
    changes = {"mean": jnp.zeros(2), "count": None, "mask": None}
    return Form.of(common, changes, pj.data_mesh(2), "data", RoundSchedule(1, 0))


def test_changes_have_averaged_leaves_alone():
    assert form().averaged == (False, False, True)  # count, mask, mean
    found = changes_of(form(), OWN, AGREED)
    assert found["mean"].tolist() == [3, -1]
    assert found["count"] is found["mask"] is None


def test_group_keeps_its_progress_since_the_round():
    """The group sent a change of 2 where the mean is 3, and has added 1 since."""
    sent = {"mean": jnp.array([2.0, 2.0]), "count": None, "mask": None}
    total = jax.tree.map(lambda x: 2 * (x + 1), sent)
    reduced = Reduced.of(Message({}, total), jnp.array(True))
    after, own = agreed_on(AGREED, OWN, sent, reduced, 2)
    assert after["mean"].tolist() == [5, 5]
    assert own["mean"].tolist() == [5 + 1, 1 + 1]
    assert (after["count"], own["count"]) == (7, 7)
    assert at_agreed(form(), own, after)["mean"].tolist() == [5, 5]


def test_changes_with_nan_move_nothing():
    sent = {"mean": jnp.array([2.0, 2.0]), "count": None, "mask": None}
    total = sent | {"mean": jnp.array([jnp.nan, 1.0])}
    reduced = Reduced.of(Message({}, total), jnp.array(True))
    after, own = agreed_on(AGREED, OWN, sent, reduced, 2)
    assert after["mean"].tolist() == AGREED["mean"].tolist()
    assert own["mean"].tolist() == OWN["mean"].tolist()


def loss_with_state(params, batch, *, model_state):
    mean = 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(0)
    counted = {"mean": mean, "count": model_state["count"] + 1}
    loss = loss_fn(params, batch) + 0 * mean.sum()
    return loss, pj.Aux(model_state=model_state | counted)


def start():
    mean = np.zeros(4, np.float32)
    return {"mean": mean, "count": np.int32(0), "mask": np.float32(-np.inf)}


def by_hand(data, groups, every, overlap):
    """Returns what all agree on, and the running mean of every group."""
    agreed, own = start()["mean"], [start()["mean"]] * groups
    for number, batch in enumerate(data, 1):
        changes = [s - agreed for s in own]
        every_share = zip(own, shares(batch, groups), strict=True)
        own = [0.9 * s + 0.1 * share["x"].mean(0) for s, share in every_share]
        if number % every == 0:
            if not overlap:
                changes = [s - agreed for s in own]
            after = agreed + np.mean(changes, axis=0)
            pairs = zip(own, changes, strict=True)
            own = [s + (after - (agreed + e)) for s, e in pairs]
            agreed = after
    return agreed, own


# Tests share local steps, and with them traced programs.
@functools.cache
def made(executor="fused", inside=False, groups=4, **settings):
    names = ("host", "device") if inside else "host"
    mesh = pj.data_mesh(groups, axis_name=names, hosts=2 if inside else None)
    return pj.make_local_step(
        loss_with_state,
        optax.adamw(1e-2),
        mesh=mesh,
        axis_name="host",
        executor=executor,
        **settings,
    )


def run(train, state, data):
    for batch in data:
        given = train.batch(batch, axis_name=train.mesh.axis_names)
        state, _ = train.step(state, given)
    return state


@grid(
    1,
    rounds=[(3, 0), (3, 1), (3, 3), (4, 2)],
    executor=["fused", "host"],
    inside=[False, True],
)
def test_groups_average_their_model_states(rounds, executor, inside):
    every, overlap = rounds
    train = made(executor, inside, sync_every=every, overlap_steps=overlap)
    data = batches(11)
    state = train.init(params(), model_state=start(), batch=data[0])
    state = run(train, state, data)
    agreed, own = by_hand(data, 2 if inside else 4, every, overlap)
    np.testing.assert_allclose(state.model_state["mean"], agreed, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        state.local.model_state["mean"], own, rtol=1e-5, atol=1e-7
    )
    assert set(state.local.model_state["count"].tolist()) == {11}
    assert np.isneginf(state.model_state["mask"])
    drained, _ = train.drain(state)
    for mean in drained.local.model_state["mean"]:
        np.testing.assert_array_equal(mean, drained.model_state["mean"])
    mean = np.mean(own, axis=0)
    np.testing.assert_allclose(mean, drained.model_state["mean"], rtol=1e-5)
    assert drained.model_state["count"] == 11


@pytest.mark.parametrize("groups", [4, 2])
def test_checkpoint_has_the_model_state(tmp_path, groups):
    data, rounds = batches(10), {"sync_every": 3, "overlap_steps": 2}
    train, other = made(**rounds), made(groups=groups, **rounds)
    state = train.init(params(), model_state=start(), batch=data[0])
    state = run(train, state, data[:7])
    like = other.abstract_state(params(), model_state=start(), batch=data[0])
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, state)
        manager.wait_until_finished()
        found = checkpoint.restore(manager, other, like).state
    if groups == 4:
        ends = [run(train, each, data[7:]).model_state for each in (state, found)]
        chex.assert_trees_all_equal(*jax.device_get(ends))
        return
    wanted = train.drain(state)[0].model_state
    for mean in (found.model_state["mean"], *found.local.model_state["mean"]):
        np.testing.assert_allclose(mean, wanted["mean"], rtol=1e-5)
    assert found.local.model_state["count"].tolist() == [7, 7]
    run(other, found, data[7:])


def test_move_to_other_groups_leaves_constants_alone(tmp_path):
    """A mean of three floats may be another float, and a sum may overflow."""
    data, rounds = batches(4, size=12), {"sync_every": 3, "overlap_steps": 2}
    constant = np.array([0.1, 0.7, 2e38, 1 / 3], np.float32)

    def loss(params, batch, *, model_state):
        counted = model_state | {"count": model_state["count"] + 1}
        return loss_fn(params, batch), pj.Aux(model_state=counted)

    def of(groups):
        mesh, tx = pj.data_mesh(groups), optax.inject_hyperparams(optax.sgd)(0.1)
        train = pj.make_local_step(loss, tx, mesh=mesh, **rounds)
        given = {"constant": constant, "count": np.int32(0)}
        return train, train.init(params(), model_state=given, batch=data[0])

    (train, state), (other, like) = of(3), of(2)
    state = run_plain(train, state, data)
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, state)
        manager.wait_until_finished()
        found = checkpoint.restore(manager, other, like).state
    assert found.model_state["constant"].tolist() == constant.tolist()
    for each in found.local.model_state["constant"]:
        assert each.tolist() == constant.tolist()
    rates = found.local.trainable.opt_state.hyperparams["learning_rate"]
    assert rates.tolist() == [np.float32(0.1)] * 2


def test_move_to_other_groups_refuses_nan_as_a_drain_does(tmp_path):
    data, rounds = batches(6), {"sync_every": 4, "overlap_steps": 2}
    data[-1]["x"][0, 0] = np.nan

    def of(groups):
        train = made(groups=groups, skip_nonfinite=False, **rounds)
        return train, train.init(params(), model_state=start(), batch=data[0])

    (train, state), (other, like) = of(2), of(1)
    state = run(train, state, data)
    drained, _ = train.drain(state)
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, state)
        manager.wait_until_finished()
        found = checkpoint.restore(manager, other, like).state
    assert np.isfinite(found.model_state["mean"]).all()
    for ours, theirs in (
        (found.model_state["mean"], drained.model_state["mean"]),
        (found.params["up"], drained.params["up"]),
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert int(found.shared.refused) == int(drained.shared.refused) > 0


def run_plain(train, state, data):
    for batch in data:
        state, _ = train.step(state, batch)
    return state
