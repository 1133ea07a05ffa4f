"""Tests local steps whose exchange runs on the communication thread."""

import copy
import tempfile
import threading

import chex
import jax
import optax
import pytest
from jax.sharding import Mesh

import pipejax as pj
from pipejax import checkpoint, codecs, collectives
from pipejax._core.executors._own_collectives import OwnCollectives

from ...grid import each
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


@pytest.mark.full
@pytest.mark.parametrize("overlap", each([0, 2, 3], full=[2]))
@pytest.mark.parametrize("names", ["data", ("host", "device")])
@pytest.mark.filterwarnings("ignore:nothing is split")
def test_chunks_are_summed_by_copy_on_another_device(names, overlap):
    """A CPU sums the chunks of all GPUs of a process, for which devices stand here."""
    groups = names if isinstance(names, str) else names[0]
    size = {"hosts": 2} if names != groups else {}
    settings = {"mesh": pj.data_mesh(4, axis_name=names, **size), "sync_every": 3}
    settings |= {"axis_name": groups, "overlap_steps": overlap, "executor": "host"}

    def trained(all_reduce, mesh=None):
        train = pj.make_local_step(
            loss_fn, optax.sgd(0.1), all_reduce=all_reduce, **settings
        )
        if mesh is not None:  # cached_property stores it here
            train.executor.__dict__["reduction_mesh"] = mesh
        state = after(train, train.init(init_params()), 4)
        with (
            tempfile.TemporaryDirectory() as folder,
            checkpoint.manager(folder) as manager,
        ):
            checkpoint.save(manager, state)
            like = train.abstract_state(init_params())
            state = checkpoint.restore(manager, train, like).state
        return after(train, state, 4, first=4), train

    other = settings["mesh"].devices.flat[-1:].reshape((1,) * len(size | {"x": 0}))
    other = Mesh(other, settings["mesh"].axis_names)
    plain = collectives.psum()
    assert_bits_equal(*(jax.device_get(trained(plain, x)[0]) for x in (None, other)))

    coded = collectives.two_shot(codecs.error_feedback(codecs.int8(8)))
    state, train = trained(coded, other)
    leaves = jax.tree.leaves(state.own.codec_states)
    assert {d for x in leaves for d in x.sharding.device_set} == {*other.devices.flat}
    assert any(x.any() for x in leaves)
    pairs = trained(plain), (state, train)
    exact, found = (train.drain(state)[0].params for state, train in pairs)
    # An exchange of eight bits loses at most a 254th of the greatest element of a
    # block. There are at most eight exchanges.
    moved = jax.tree.map(lambda a, b: abs(a - b).max(), exact, init_params())
    limit = 8 / 254 * float(max(jax.tree.leaves(moved)))
    chex.assert_trees_all_close(found, exact, atol=limit)
