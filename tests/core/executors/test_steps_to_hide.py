"""Tests how many steps are found to hide an exchange."""

import time

import pytest

from pipejax._core.executors._steps_to_hide import steps_to_hide


@pytest.mark.parametrize(("ratio", "steps"), [(4.0, 5), (0.01, 1)])
def test_steps_hide_an_exchange_with_a_margin(monkeypatch, ratio, steps):
    clock = [0.0]

    def taking(seconds):
        def run():
            clock[0] += seconds

        return run

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert steps_to_hide(taking(1.0), taking(ratio)) == steps
