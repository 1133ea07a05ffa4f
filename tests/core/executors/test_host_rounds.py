"""Tests local steps whose exchange runs on the communication thread."""

import copy
import threading

import jax
import jax.numpy as jnp
import optax
import pytest

import pipejax as pj

from ...helpers import assert_bits_equal, batches, init_params, loss_fn


def made(loss=loss_fn, **settings):
    settings = {"sync_every": 3, "overlap_steps": 3, "executor": "host"} | settings
    mesh = pj.data_mesh(2)
    return pj.make_local_step(loss, optax.adamw(1e-2), mesh=mesh, **settings)


def after(train, state, steps, first=0):
    for batch in batches(first + steps)[first:]:
        state, _ = train.step(state, batch)
    return state


def test_thread_has_all_chunks_as_soon_as_a_round_ends():
    train = made()
    state, counts = train.init(init_params()), []
    for batch in batches(6):
        state, _ = train.step(state, batch)
        counts.append(len(train.executor._begun))
    assert counts == [0, 0, 3, 2, 1, 3]
    train.join()
    assert all(begun.result.done() for begun in train.executor._begun)


@pytest.mark.parametrize("steps", [2, 3, 4, 5])
def test_state_from_elsewhere_continues_with_the_same_bits(steps):
    """Another train step has none of its exchanges, and so starts what is left."""
    train, other = made(), made()
    state = after(train, train.init(init_params()), steps)
    copied = jax.tree.map(jnp.copy, jax.tree.map(jnp.asarray, state))
    copied = copied._replace(position=state.position)
    ends = [
        each.drain(after(each, begun, 5, first=steps))[0]
        for each, begun in ((train, state), (other, copied))
    ]
    assert_bits_equal(*jax.device_get([(end.shared, end.local) for end in ends]))


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

    monkeypatch.setitem(train.executor.__dict__, "_sum", fails)
    state = after(train, train.init(init_params()), 3)
    (batch,) = batches(1)
    with pytest.raises(RuntimeError, match="link is down"):
        train.step(state, batch)
    monkeypatch.undo()
    found = after(train, state, 4)  # the state is as it was
    wanted = made()
    wanted = after(wanted, after(wanted, wanted.init(init_params()), 3), 4)
    assert_bits_equal(*jax.device_get([(x.shared, x.own) for x in (found, wanted)]))


def test_copy_of_an_executor_has_no_exchange():
    train = made()
    after(train, train.init(init_params()), 3)
    assert not copy.deepcopy(train.executor)._begun
