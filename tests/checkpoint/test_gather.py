"""Tests that values of processes come back; with several, in test_processes.py."""

from pipejax.checkpoint._gather import gathered


def test_process_alone_gets_its_own_value():
    assert gathered({"a": [1, None]}) == [{"a": [1, None]}]
