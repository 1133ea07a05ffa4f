"""Tests when a program with collectives may be dispatched."""

import optax
import pytest

import pipejax as pj
from pipejax._core.executors import _turns
from pipejax._internal import communication_thread

from ...helpers import batches, init_params, loss_fn


class Slow:
    """Stands for a result of a program, and counts how often it is waited for."""

    size, waited, deleted = 1, 0, False

    def is_deleted(self):
        return self.deleted

    def block_until_ready(self):
        self.waited += 1


@pytest.mark.parametrize(("devices", "waits"), [(1, 0), (2, 1)])
def test_devices_of_one_process_wait_for_the_program_before(
    monkeypatch, devices, waits
):
    monkeypatch.setattr(communication_thread.jax, "Array", Slow)
    mesh, result = pj.data_mesh(devices), Slow()
    assert _turns.in_turn(mesh, lambda x: {"result": x}, result) == {"result": result}
    for _ in range(2):
        _turns.in_turn(mesh, tuple)
    assert result.waited == waits


def test_next_program_waits_only_for_chosen_results(monkeypatch):
    monkeypatch.setattr(communication_thread.jax, "Array", Slow)
    mesh, state, info = pj.data_mesh(2), Slow(), Slow()
    _turns.in_turn(mesh, lambda: (state, info), ended=lambda results: results[1])
    _turns.in_turn(mesh, tuple)
    assert (state.waited, info.waited) == (0, 1)


def test_deleted_result_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(communication_thread.jax, "Array", Slow)
    mesh, result = pj.data_mesh(2), Slow()
    result.deleted = True
    _turns.in_turn(mesh, lambda: result)
    _turns.in_turn(mesh, tuple)
    assert not result.waited


def test_step_waits_for_a_program_of_another_state(monkeypatch):
    """It may be a drain whose state is put aside, or of another train step."""
    mesh, noted = pj.data_mesh(4), []
    train, other = (
        pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, executor="fused")
        for _ in range(2)
    )
    (batch,) = batches(1)
    states = [each.init(init_params()) for each in (train, other)]
    monkeypatch.setattr(_turns, "beside", lambda x: noted.append(("ran", x)))
    monkeypatch.setattr(_turns, "join", lambda: noted.append("waited"))
    train.step(states[0], batch)
    train.drain(states[0])
    other.step(states[1], batch)
    assert [x if x == "waited" else x[0] for x in noted] == ["waited", "ran"] * 3
