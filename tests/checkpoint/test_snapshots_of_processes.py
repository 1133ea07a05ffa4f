"""Tests that two processes, each with a memory of its own, continue from snapshots."""

import contextlib

import pytest

from ..core.executors.group import Group

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def group():
    with contextlib.closing(Group(2)) as group:
        yield group


@pytest.fixture(scope="module")
def undisturbed(group, tmp_path_factory):
    """Returns the parameters after six steps."""
    found = group.ask("trained", tmp_path_factory.mktemp("alone"), 6)
    return found[0][1]


def newest(folder, rank, kind):
    """Returns the newest file in the memory of a process."""
    files = folder.glob(f"memory of {rank}/*/{kind}-*.json")
    return max(files, key=lambda path: path.stat().st_mtime_ns)


def lose_nothing(folder):
    del folder


def lose_a_host(folder):
    for path in folder.glob("memory of 1/*/*"):
        path.unlink()


def damage_a_part(folder):
    path = newest(folder, 1, "part").with_suffix(".data")
    path.write_bytes(bytes(path.stat().st_size))


def break_off_a_part_and_its_copy(folder):
    newest(folder, 1, "part").unlink()
    newest(folder, 0, "copy").unlink()


def lose_all_memory(folder):
    for path in folder.glob("memory of */*/*"):
        path.unlink()


@pytest.mark.parametrize(
    ("fault", "step"),
    [
        *((lose_nothing, 3), (lose_a_host, 3), (damage_a_part, 3)),
        *((break_off_a_part_and_its_copy, 2), (lose_all_memory, 0)),
    ],
)
def test_job_continues_with_the_same_bits(group, undisturbed, tmp_path, fault, step):
    group.ask("trained", tmp_path, 3)
    fault(tmp_path)
    found = group.ask("trained", tmp_path, 6)
    assert found == [[step, undisturbed]] * 2


def test_job_continues_after_one_fault_after_the_other(group, undisturbed, tmp_path):
    """The host that is lost second keeps what the first needs until a new snapshot."""
    for until in (2, 3, 5):
        group.ask("trained", tmp_path, until)
        lose_a_host(tmp_path)
    assert group.ask("trained", tmp_path, 6) == [[5, undisturbed]] * 2


def test_processes_go_back_to_the_same_snapshot(group, tmp_path):
    assert group.ask("rolled_back", tmp_path) == [[[4, 0], [3, 0]]] * 2


def test_snapshot_with_differing_extras_does_not_count(group, tmp_path):
    assert group.ask("differing_extras", tmp_path) == [None, None]


def test_memory_is_freed_once_all_processes_leave_in_good_order(group, tmp_path):
    for fails, left in ((True, 1), (False, 0)):
        folder = tmp_path / str(fails)
        folder.mkdir()
        assert group.ask("closed", folder, fails) == [left, left]


def test_failing_copy_ends_the_snapshots_of_all(group, tmp_path):
    """The training goes on, and what was complete before stays."""
    for off, newest in group.ask("failing_copy", tmp_path):
        assert off.endswith("(process 0)")
        assert newest == 2
