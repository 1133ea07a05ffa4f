"""Tests local steps whose exchange runs on the communication thread."""

import copy
import threading

import jax
import optax
import pytest

import pipejax as pj
from pipejax._core.executors._own_collectives import OwnCollectives

from ...helpers import assert_bits_equal, batches, init_params, loss_fn


def made(loss=loss_fn, **settings):
    settings = {"sync_every": 3, "overlap_steps": 3, "executor": "host"} | settings
    mesh = pj.data_mesh(2)
    return pj.make_local_step(loss, optax.adamw(1e-2), mesh=mesh, **settings)


def after(train, state, steps, first=0):
    for batch in batches(first + steps)[first:]:
        state, _ = train.step(state, batch)
    return state


def test_chunk_is_summed_on_the_thread_beside_the_step(monkeypatch):
    train, seen = made(), []
    state = train.init(init_params())
    whole, compute = train.executor._sum, train.executor._train

    def summed(*args):
        seen.append(threading.current_thread() is threading.main_thread())
        assert begun.wait(60)  # the step is dispatched before its chunk arrives
        return whole(*args)

    def dispatched(program):
        def run(*args):
            found = program(*args)
            begun.set()
            return found

        return run

    begun = threading.Event()
    programs = {kind: dispatched(program) for kind, program in compute.items()}
    monkeypatch.setitem(train.executor.__dict__, "_sum", summed)
    monkeypatch.setitem(train.executor.__dict__, "_train", programs)
    monkeypatch.setattr(OwnCollectives, "check", lambda *_: None)
    after(train, state, 3)
    assert seen == [False] * 3


def test_older_state_is_stepped_again_with_the_same_bits():
    train = made()
    state = after(train, train.init(init_params()), 4)
    first, second = (train.drain(after(train, state, 4, first=4))[0] for _ in "ab")
    assert_bits_equal(*jax.device_get([first.shared, second.shared]))


def test_state_goes_from_one_executor_to_the_other():
    train, fused = made(), made(executor="fused")
    state = after(train, train.init(init_params()), 4)
    found = fused.drain(after(fused, state, 4, first=4))[0]
    wanted = train.drain(after(train, state, 4, first=4))[0]
    assert_bits_equal(*jax.device_get([found.shared, wanted.shared]))


def test_error_on_the_thread_reaches_the_caller(monkeypatch):
    train = made()

    def fails(*args):
        assert threading.current_thread() is not threading.main_thread()
        raise RuntimeError("link is down")

    state = after(train, train.init(init_params()), 3)
    monkeypatch.setitem(train.executor.__dict__, "_sum", fails)
    (batch,) = batches(1)
    with pytest.raises(RuntimeError, match="link is down"):
        train.step(state, batch)
    monkeypatch.undo()
    found = after(train, state, 4)  # the state is as it was
    wanted = made()
    wanted = after(wanted, after(wanted, wanted.init(init_params()), 3), 4)
    assert_bits_equal(*jax.device_get([(x.shared, x.own) for x in (found, wanted)]))


def test_copy_of_a_step_has_the_same_bits():
    train = made()
    state = after(train, train.init(init_params()), 3)
    found = after(copy.deepcopy(train), state, 2, first=3)
    wanted = after(train, state, 2, first=3)
    assert_bits_equal(*jax.device_get([(x.shared, x.own) for x in (found, wanted)]))
