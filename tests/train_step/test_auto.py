"""Tests that "auto" moves to one program if loss or optimizer has a collective."""

import time

import jax
import numpy as np
import optax
import pytest
from jax import lax

import pipejax as pj
from pipejax._internal.hlo._collective_groups import CollectiveGroups

from ..helpers import assert_bits_equal, batches, init_params, loss_fn, wrap_exchange

REASON = "`loss_fn` or `tx` has a collective between processes, all-reduce ("


@pytest.fixture(autouse=True)
def between_processes(monkeypatch):
    """Makes every collective count as one between processes."""
    executors = "pipejax._core.executors"
    for module in ("_own_collectives", "_turns"):
        where = f"{executors}.{module}.spans_cpu_processes"
        monkeypatch.setattr(where, lambda mesh: True)
    monkeypatch.setattr(CollectiveGroups, "crosses_processes", True)
    choice = "host", "two processes"
    monkeypatch.setattr(f"{executors}._choose._automatic", lambda config: choice)


def averaged_update(updates, state, params=None):
    del params
    return lax.pmean(updates, "data"), state


def averaged_loss(params, batch):
    return lax.pmean(loss_fn(params, batch), "data")


def made(own=None, executor="auto", width=2, **options):
    """Returns a train step whose loss or optimizer has a collective of its own."""
    tx = optax.adam(1e-2)
    if own == "optimizer":
        mean = optax.GradientTransformation(
            lambda _: optax.EmptyState(), averaged_update
        )
        tx = optax.chain(tx, mean)
    return pj.make_train_step(
        averaged_loss if own == "loss" else loss_fn,
        tx,
        mesh=pj.data_mesh(2),
        width=width,
        executor=executor,
        **options,
    )


def trained(train, steps=3):
    state = train.init(init_params())
    for batch in batches(steps):
        state, _ = train.step(state, batch)
    return state


def drained(train):
    return jax.tree.map(np.asarray, train.drain(trained(train))[0])


@pytest.mark.parametrize(
    ("own", "name"), [(None, "host"), ("loss", "fused"), ("optimizer", "fused")]
)
def test_auto_takes_one_program_only_for_own_collectives(own, name):
    """The step that finds the collective is taken once, although it starts twice."""
    train = made(own)
    assert (train.executor.name, train.executor.reason) == ("host", "two processes")
    assert_bits_equal(drained(train), drained(made(own, "fused")))
    assert train.executor.name == name
    assert train.executor.reason.startswith("two" if own is None else REASON)


@pytest.mark.parametrize(("own", "name"), [("loss", "host"), ("optimizer", "fused")])
def test_drain_has_only_the_collectives_of_the_update(own, name):
    fused, train = made(own, "fused", width=3), made(own, width=3)
    state = trained(fused)
    found, wanted = (x.drain(state)[0] for x in (train, fused))
    assert_bits_equal(*(jax.tree.map(np.asarray, x) for x in (found, wanted)))
    assert train.executor.name == name


def test_no_exchange_is_under_way_when_the_executor_changes():
    """The program has a collective, which must not meet those of the thread."""
    # With weight prediction, the compute would have the collective, too.
    train, ended = made("optimizer", weight_prediction=False), []

    def recorded(exchange, *args):
        time.sleep(0.2)
        ended.append(time.monotonic())
        return exchange(*args)

    wrap_exchange(train.executor, recorded)
    state = train.init(init_params())
    state, _ = train.step(state, batches(1)[0])
    # One of the two exchanges is waited for; the other one is started for the next
    # step.
    assert len(ended) == 2
    assert train.executor.name == "fused"


def test_local_steps_take_one_program_for_own_collectives():
    def trained(executor):
        train = pj.make_local_step(
            averaged_loss,
            optax.sgd(0.1),
            mesh=pj.data_mesh(2),
            sync_every=2,
            overlap_steps=2,
            executor=executor,
        )
        state = train.init(init_params())
        for batch in batches(5):
            state, _ = train.step(state, batch)
        return train, state

    train, state = trained("auto")
    assert train.executor.name == "fused"
    assert train.executor.reason.startswith(REASON)
    assert_bits_equal(*jax.device_get([state.own, trained("fused")[1].own]))
    with pytest.raises(ValueError, match="must not be 'host'"):
        trained("host")


def test_requested_host_executor_is_kept():
    """Only "auto" moves: the error names the collective and the remedy."""
    train = made("loss", "host")
    with pytest.raises(ValueError, match=r"must not be 'host' .* Choose executor='f"):
        trained(train)
    assert train.executor.name == "host"


class UnpluggedError(Exception):
    """Stands for the error of a broken network."""


def test_other_errors_reach_the_caller():
    train = made(width=1)

    def broken(*args):
        raise UnpluggedError

    wrap_exchange(train.executor, broken)
    with pytest.raises(UnpluggedError):
        trained(train)
    assert train.executor.name == "host"
