"""Tests when a program with collectives may be dispatched."""

import pytest

import pipejax as pj
from pipejax._core.executors import _turns


@pytest.mark.parametrize(("devices", "waits"), [(1, False), (2, True)])
def test_devices_of_one_process_wait_for_the_step_before(monkeypatch, devices, waits):
    waited = []
    monkeypatch.setattr(_turns.jax, "block_until_ready", waited.append)
    _turns.wait_turn(pj.data_mesh(devices), "before")
    _turns.hand_on(pj.data_mesh(devices), "results")
    assert waited == ["before"] * waits
