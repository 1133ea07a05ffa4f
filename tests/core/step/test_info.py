"""Tests what steps and drains report, and the mean of reports."""

import jax
import numpy as np
import optax
import pytest

import pipejax as pj

from ...grid import grid
from ...helpers import assert_bits_equal, batches, init_params, loss_fn


def with_metric(params, batch):
    loss = loss_fn(params, batch)
    return loss, pj.Aux(metrics={"squared": loss**2})


def epoch(steps, width, **settings):
    train = pj.make_train_step(
        with_metric, optax.sgd(0.1), mesh=pj.data_mesh(4), width=width, **settings
    )
    data = batches(steps)
    state, infos = train.init(init_params(), batch=data[0]), []
    for batch in data:
        state, info = train.step(state, batch)
        infos.append(info)
    state, late = train.drain(state)
    return state, infos, late


@grid(1, width=[1, 2, 3], executor=["fused", "host"], steps=[1, 5])
def test_drain_reports_the_losses_missing_from_the_steps(width, executor, steps):
    state, infos, late = epoch(steps, width, executor=executor)
    assert len(late) == width - 1
    arrived = [info for info in (*infos, *late) if info.arrived]
    assert len(arrived) == steps
    assert all(info.applied for info in arrived)
    for info in (*infos, *late):
        assert bool(info.arrived) == np.isfinite(info.loss)
        assert float(info.weight) == float(info.arrived)
        np.testing.assert_allclose(info.metrics["squared"], info.loss**2, rtol=0.5)
    mean = pj.mean_info([*infos, *late])
    losses = [float(info.loss) for info in arrived]
    assert mean.loss == np.float32(np.mean(losses))
    assert (bool(mean.arrived), float(mean.weight)) == (True, steps)
    # A drain with nothing in flight reports that nothing has arrived.
    train = pj.make_train_step(
        with_metric, optax.sgd(0.1), mesh=pj.data_mesh(4), width=width
    )
    again, nothing = train.drain(state)
    assert_bits_equal(again.params, state.params)
    assert not any(info.arrived for info in nothing)


def test_drain_inside_jit_gives_the_same_infos():
    train = pj.make_train_step(with_metric, optax.sgd(0.1), mesh=pj.data_mesh(4))
    (batch,) = batches(1)
    state, _ = train.step(train.init(init_params(), batch=batch), batch)
    plain, traced = train.drain(state), jax.jit(train.drain)(state)
    assert_bits_equal(plain[1], traced[1])


def test_mean_of_infos_before_any_arrival_is_nan():
    _, (info,), _ = epoch(1, 2)
    mean = pj.mean_info([info])
    assert not mean.arrived
    assert np.isnan(mean.loss)
    assert np.isnan(mean.metrics["squared"])
    with pytest.raises(ValueError, match="`infos` must hold at least one StepInfo"):
        pj.mean_info([])


def test_numpy_mean_of_infos_with_a_missing_loss_is_nan():
    _, infos, _ = epoch(3, 2)
    assert np.isnan(np.mean([info.loss for info in infos]))


def test_infos_stacked_by_a_scan_have_the_mean_of_a_list():
    train = pj.make_train_step(with_metric, optax.sgd(0.1), mesh=pj.data_mesh(4))
    data = batches(4)
    state = train.init(init_params(), batch=data[0])
    stacked = jax.tree.map(lambda *x: np.stack(x), *data)
    state, infos = jax.lax.scan(train.step, state, stacked)
    _, late = train.drain(state)
    every = [jax.tree.map(lambda x, i=i: x[i], infos) for i in range(len(data))]
    wanted = pj.mean_info([*every, *late])
    assert wanted.loss == np.mean(np.float64([x.loss for x in (*every[1:], *late)]))
    assert_bits_equal(pj.mean_info([infos, *late]), wanted)
    assert_bits_equal(pj.mean_info(infos), pj.mean_info(every))
    with pytest.raises(ValueError, match="`infos` must hold at least one StepInfo"):
        pj.mean_info(jax.tree.map(lambda x: x[:0], infos))


def test_reports_of_local_steps_have_no_mean_info():
    train = pj.make_local_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2))
    state, info = train.step(train.init(init_params()), batches(1)[0])
    _, (arrival,) = train.drain(state)
    for name, report in (("RoundInfo", info), ("Arrival", arrival)):
        with pytest.raises(ValueError, match=f"`infos` must .* got {name}.* average"):
            pj.mean_info([report])
