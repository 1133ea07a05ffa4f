"""Tests the synchronous steps with which local steps begin."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import checkpoint

from ...grid import grid
from ...groups import batches, mesh_of, placed
from ...helpers import assert_bits_equal

TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def loss_fn(params, batch, *, model_state, rng):
    hidden = jax.numpy.tanh(batch["x"] @ params["up"] + params["bias"])
    scaled = (hidden @ params["down"])[:, :3] * params["scale"]
    noise = jax.random.normal(rng, scaled.shape)
    loss = ((scaled + 0.1 * noise - batch["y"]) ** 2).mean()
    mean = 0.9 * model_state + 0.1 * batch["x"].mean(0)
    weight = jax.numpy.abs(batch["x"]).sum()
    return loss, pj.Aux({"noise": noise.mean()}, model_state=mean, weight=weight)


def begun(train, name, batch):
    state = {"model_state": np.zeros(4, np.float32), "rng": jax.random.key(0)}
    return train.init(placed(train.mesh, name), **state, batch=batch)


def run(train, state, data, name):
    names, infos = ("host", "device" if name == "copies" else "fsdp"), []
    for batch in data:
        state, info = train.step(state, train.batch(batch, axis_name=names))
        infos.append(info)
    return state, infos


def made(name, **settings):
    settings = {"sync_every": 2, "overlap_steps": 2, "warmup_steps": 3} | settings
    return pj.make_local_step(
        loss_fn, TX, mesh=mesh_of(2, name), axis_name="host", **settings
    )


@pytest.mark.full
@grid(1, name=["copies", "fsdp"], executor=["fused", "host"], donate=[False, True])
def test_warm_up_has_the_results_of_synchronous_steps(name, executor, donate):
    data = batches(9)
    local = made(name, executor=executor, donate=donate)
    plain = pj.make_train_step(
        loss_fn, TX, mesh=local.mesh, axis_name="host", width=1, executor="fused"
    )
    wanted, infos = run(plain, begun(plain, name, data[0]), data[:3], name)
    state, found = run(local, begun(local, name, data[0]), data[:3], name)
    close(state.params, wanted.params)
    close(state.model_state, wanted.model_state)
    for each in ([x[i] for x in leaves(state.local.trainable)] for i in range(2)):
        close(each, leaves((wanted.params, wanted.opt_state)))
    assert_bits_equal(jax.random.key_data(state.local.rng[0]), key_of(wanted))
    for ours, theirs in zip(found, infos, strict=True):
        close(ours.loss, theirs.loss)
        close(ours.metrics["noise"], theirs.metrics["noise"])
        close(ours.weight, theirs.weight)
        close(ours.grad_norm, np.full(2, theirs.grad_norm))
        assert ours.arrived
        assert not np.allclose(*ours.local_loss)
    # Rounds begin as they do after a warm-up by another train step.
    other = made(name, executor=executor, warmup_steps=0)
    again = other.init(
        jax.tree.map(jax.numpy.copy, state.params),
        model_state=wanted.model_state,
        rng=wanted.rng,
        opt_state=wanted.opt_state,
        batch=data[0],
    )
    ends = [
        run(train, each, data[3:], name)[0]
        for train, each in ((local, state), (other, again))
    ]
    close(ends[0].params, ends[1].params)
    assert ends[0].position == ends[1].position


def leaves(tree):
    return jax.tree.leaves(tree)


def key_of(state):
    return jax.random.key_data(state.rng)


def close(found, wanted):
    chex.assert_trees_all_close(
        jax.device_get(found), jax.device_get(wanted), rtol=1e-4, atol=1e-5
    )


def test_drain_inside_a_warm_up_changes_nothing():
    train, data = made("fsdp"), batches(5)
    state, _ = run(train, begun(train, "fsdp", data[0]), data[:2], "fsdp")
    drained, reports = train.drain(state)
    assert not reports
    assert tuple(drained.position) == (0, 0, 1)
    assert_bits_equal(*jax.device_get([drained.params, state.params]))
    ends = [run(train, each, data[2:], "fsdp")[0].params for each in (state, drained)]
    close(*ends)


def test_run_continues_from_a_checkpoint_inside_a_warm_up(tmp_path):
    train, data = made("fsdp"), batches(7)
    state, _ = run(train, begun(train, "fsdp", data[0]), data[:2], "fsdp")
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, state)
        manager.wait_until_finished()
        found = checkpoint.restore(manager, train, jax.eval_shape(lambda: state)).state
    assert tuple(found.position) == (0, 0, 1)
    ends = [run(train, each, data[2:], "fsdp")[0] for each in (state, found)]
    assert_bits_equal(*jax.device_get([end.params for end in ends]))


def test_negative_number_of_steps_is_refused():
    with pytest.raises(ValueError, match="`warmup_steps` must be an integer"):
        made("copies", warmup_steps=-1)


def test_report_without_its_batch_is_refused_in_the_first_step():
    def reporting(params, batch):
        return (params * batch["x"].sum()).sum(), pj.Aux({"seen": batch["x"].sum()})

    train = pj.make_local_step(
        reporting, optax.sgd(0.1), mesh=pj.data_mesh(2), warmup_steps=3
    )
    state = train.init(np.ones(2, np.float32))
    with pytest.raises(ValueError, match=r"`batch` must be given to `train.init`"):
        train.step(state, batches(1)[0])


@pytest.mark.parametrize("name", ["copies", "fsdp"])
def test_outer_optimizer_begins_after_a_warm_up(name):
    """Its copy of the anchor is not from before the warm-up."""
    outer = optax.contrib.schedule_free(optax.sgd(1.0), 1.0)
    train, data = made(name, outer_tx=outer), batches(3)
    state, _ = run(train, begun(train, name, data[0]), data, name)
    for anchor, of_chunk in zip(state.shared.anchor, state.shared.outer, strict=True):
        assert_bits_equal(of_chunk.z, anchor)


def test_group_without_data_has_no_loss_of_its_own():
    def loss(w, batch):
        count = batch["real"].sum()
        total = (batch["real"] * (w - batch["x"]) ** 2).sum()
        return total / jnp.maximum(count, 1), pj.Aux(weight=count)

    train = pj.make_local_step(
        loss, optax.sgd(0.1), mesh=pj.data_mesh(2), warmup_steps=1
    )
    batch = {"x": np.ones(4, "f4"), "real": np.float32([1, 1, 0, 0])}
    state = train.init(jnp.float32(0), batch=batch)
    for _ in range(2):  # synchronous, then local
        state, info = train.step(state, batch)
        assert np.isnan(info.local_loss).tolist() == [False, True]
