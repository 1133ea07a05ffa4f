"""Tests that two processes restore all of a checkpoint, or that both refuse it."""

import contextlib

import pytest

from pipejax import checkpoint

from ..core.executors.group import Group
from .helpers import entries

# In the quick run, tests/core/executors/test_processes.py saves and restores.
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def group():
    with contextlib.closing(Group(2)) as group:
        yield group


def test_state_and_extras_are_restored_on_all_processes(group, tmp_path):
    found = group.ask("saved_and_restored", tmp_path)
    assert found == [{"extras": {"position": 1}, "calls": 3}] * 2


def test_each_process_restores_its_own_part_of_the_extras(group, tmp_path):
    assert group.ask("extras_of_each", tmp_path) == [[1, 0, "00"], [1, 1, "0001"]]


def test_all_processes_fall_back_to_the_same_step(group, tmp_path):
    """One process cannot read step 2, and the folder is the same for both."""
    assert group.ask("restored_from_damage", tmp_path) == [1, 1]
    assert entries(tmp_path) == ["0", "1", "damaged-2"]


def test_all_processes_take_the_next_step_if_one_is_deleted(group, tmp_path):
    """Process 0 alone sees that the folder is gone, and both read the same step."""
    assert group.ask("restored_beside_a_deletion", tmp_path) == [1, 1]
    assert entries(tmp_path) == ["0", "1"]


def test_second_job_is_refused_on_all_processes(group, tmp_path):
    with checkpoint.manager(tmp_path):
        said = group.ask("opened", tmp_path)
    assert said[0].startswith("`folder` must not be in use by another manager")
    assert said == [said[0]] * 2
    assert group.ask("opened", tmp_path) == ["opened"] * 2


def test_input_invalid_on_one_process_is_refused_on_all(group, tmp_path):
    for rank, (differing, alone, good) in enumerate(group.ask("refused", tmp_path)):
        assert "must be the same on all processes" in differing
        assert "got others on processes [1]" in differing
        assert f"{{'position': {rank}}}" in differing
        assert "`state` must lie on the devices of all 2 processes" in alone
        assert "got skipped on those of this process only. Place it" in alone
        assert good == "saved"
    assert entries(tmp_path) == ["0"]


def test_two_managers_save_on_all_processes_in_turn(group, tmp_path):
    assert group.ask("saved_in_turn", tmp_path) == [[0, 1, 2], [0, 1, 2]]
    assert entries(tmp_path) == ["best", "last"]
