"""Tests how far the calls of a loop run ahead of a device."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax.train_step import _lead


class Device:
    """A device on which each step takes the same time, and a clock."""

    def __init__(self, seconds, dispatch):
        self.seconds, self.dispatch = seconds, dispatch
        self.now, self.free_at = 100.0, 0.0

    def monotonic(self):
        return self.now

    def run(self):
        self.now += self.dispatch
        self.free_at = max(self.now, self.free_at) + self.seconds
        return Result(self, self.free_at)


class Result:
    def __init__(self, device, ready_at):
        self.device, self.ready_at = device, ready_at

    def is_deleted(self):
        return False

    def block_until_ready(self):
        self.device.now = max(self.device.now, self.ready_at)


def behind(device, monkeypatch, steps=200):
    """Returns how many seconds of work are under way after each call."""
    monkeypatch.setattr(_lead, "time", device)
    lead, found = _lead.Lead(), []
    for _ in range(steps):
        lead.wait()
        lead.add(device.run())
        found.append(device.free_at - device.now)
    return np.array(found)


@pytest.mark.parametrize("seconds", [0.05, 0.3, 1.9, 30.0])
def test_slow_steps_are_dispatched_about_a_second_ahead(seconds, monkeypatch):
    found = behind(Device(seconds, 1e-4), monkeypatch)
    assert found.max() <= max(3 * seconds, 1.0 + 2 * seconds)


@pytest.mark.parametrize("seconds", [1e-3, 0.05, 1.9])
def test_device_is_never_idle(seconds, monkeypatch):
    found = behind(Device(seconds, seconds / 10), monkeypatch)
    assert found.min() > 0


def test_quick_steps_go_as_far_ahead_as_before(monkeypatch):
    found = behind(Device(1e-3, 1e-5), monkeypatch)
    assert found[100:].max() == pytest.approx(0.032, rel=0.1)


def test_deleted_result_is_not_waited_for():
    lead = _lead.Lead()
    for _ in range(40):
        lead.wait()
        result = jnp.ones(())
        lead.add(result)
        result.delete()


@pytest.mark.parametrize("kind", ["train", "local"])
def test_every_call_waits_and_is_counted(kind, monkeypatch):
    calls = []
    monkeypatch.setattr(_lead.Lead, "wait", lambda self: calls.append("wait"))
    monkeypatch.setattr(_lead.Lead, "add", lambda self, x, *_: calls.append(x.shape))

    def loss_fn(params, batch):
        return jnp.mean((batch @ params) ** 2)

    args = loss_fn, optax.sgd(0.1)
    if kind == "local":
        train = pj.make_local_step(*args, mesh=pj.data_mesh(), sync_every=2)
    else:
        train = pj.make_train_step(*args, mesh=pj.data_mesh())
    state = train.init(jnp.zeros(2))
    for batch in itertools.repeat(np.ones((8, 2), np.float32), 3):
        state, _ = train.step(state, batch)
    shape = (8,) if kind == "local" else ()
    assert calls == ["wait", shape] * 3


def test_traced_step_leaves_nothing_behind():
    def loss_fn(params, batch):
        return jnp.mean((batch @ params) ** 2)

    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(1))
    state, batch = train.init(jnp.zeros(2)), np.ones((8, 2), np.float32)
    jax.jit(train.step)(state, batch)
    assert not train._lead._results
