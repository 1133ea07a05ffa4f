"""Tests which snapshot is restored, if files are missing or damaged."""

import contextlib
import logging

import pytest

from pipejax import checkpoint

from ...helpers import assert_bits_equal, batches
from ..helpers import host, init, train_step
from .runs import broken_off, every_step, run


@pytest.fixture(scope="module")
def train():
    return train_step(2)


@pytest.fixture
def left(tmp_path, train, monkeypatch):
    """Leaves a checkpoint of step 2, and snapshots of steps 4 and 5."""
    every_step(monkeypatch)
    memory = tmp_path / "memory"
    memory.mkdir()
    with broken_off(tmp_path / "run", memory) as manager:
        run(manager, train, init(train), batches(5), save_at=(2,))
    return memory


def restored(memory, train, step=None):
    folder = memory.parent / "run"
    with checkpoint.manager(folder, memory=memory) as manager:
        return checkpoint.restore(manager, train, init(train), step)


def damage(memory, count):
    """Changes a byte in the newest files."""
    headers = sorted(memory.glob("*/*.json"), key=lambda x: -x.stat().st_mtime_ns)
    for path in (header.with_suffix(".data") for header in headers[:count]):
        content = bytearray(path.read_bytes())
        content[0] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize(("count", "step"), [(0, 5), (1, 4), (2, 2)])
def test_newest_whole_state_is_restored(left, train, caplog, count, step):
    damage(left, count)
    found = restored(left, train)
    assert found.extras == {"step": step}
    assert int(found.state.step) == step
    said = [x.getMessage() for x in caplog.records if x.levelno == logging.WARNING]
    assert len([x for x in said if "a snapshot cannot be read" in x]) == count


def test_step_is_taken_from_memory_or_disk(left, train):
    for step in (5, 4, 2):
        with broken_off(left.parent / "run", left) as manager:
            found = checkpoint.restore(manager, train, init(train), step)
        assert found.extras == {"step": step}
    with pytest.raises(FileNotFoundError, match=r"has steps .2.; got 3"):
        restored(left, train, 3)


def test_snapshot_of_other_devices_is_left_out(left, caplog):
    found = restored(left, train_step(4))
    assert found.extras == {"step": 2}
    said = [x.getMessage() for x in caplog.records if x.levelno == logging.WARNING]
    assert any("of step 5" in x and "is of other devices" in x for x in said)


def test_snapshot_of_another_width_is_refused(left):
    with pytest.raises(ValueError, match="width"):
        restored(left, train_step(2, width=1))


def test_newer_checkpoint_is_restored_in_place_of_snapshots(left, train):
    with broken_off(left.parent / "run", left) as manager:
        state = checkpoint.restore(manager, train, init(train)).state
        state, _ = train.step(state, batches(6)[5])
        checkpoint.save(manager, state, {"step": "saved"})
    found = restored(left, train)
    assert found.extras == {"step": "saved"}


def test_restored_state_has_every_bit(left, train):
    state = init(train)
    for batch in batches(5):
        state, _ = train.step(state, batch)
    found = restored(left, train)
    assert_bits_equal(host(found.state), host(state))
    assert found.drained is False
    assert found.infos == ()


def test_snapshot_of_the_same_manager_is_restored(tmp_path, train, monkeypatch):
    every_step(monkeypatch)
    (tmp_path / "memory").mkdir()
    folder, memory = tmp_path / "run", tmp_path / "memory"
    with checkpoint.manager(folder, memory=memory) as manager:
        state = run(manager, train, init(train), batches(5), save_at=(2,))
        kept = host(state)
        found = checkpoint.restore(manager, train, init(train))  # waits for step 5
        assert found.extras == {"step": 5}
        assert_bits_equal(host(found.state), kept)
        assert checkpoint.restore(manager, train, init(train), 4).extras == {"step": 4}


@contextlib.contextmanager
def rolled_back(folder, memory, train, monkeypatch):
    """Yields a manager and a state of step 3, after a return from step 5 to step 2.

    There are a checkpoint of step 2, a snapshot of step 5 from before the return, and
    one of step 3 from after it.
    """
    every_step(monkeypatch)
    memory.mkdir()
    with broken_off(folder, memory) as manager:
        run(manager, train, init(train), batches(5), save_at=(2,))
        state = checkpoint.restore(manager, train, init(train), 2).state
        yield manager, run(manager, train, state, batches(3, seed=1)[2:])


def test_snapshot_after_a_rollback_counts_more_than_later_steps(
    tmp_path, train, monkeypatch
):
    folder, memory = tmp_path / "run", tmp_path / "memory"
    with rolled_back(folder, memory, train, monkeypatch) as (manager, state):
        kept = host(state)
        found = checkpoint.restore(manager, train, init(train))
        assert_bits_equal(host(found.state), kept)
    with checkpoint.manager(folder, memory=memory) as manager:
        found = checkpoint.restore(manager, train, init(train))
    assert_bits_equal(host(found.state), kept)


def test_snapshots_from_before_a_rollback_are_not_restored(
    tmp_path, train, monkeypatch
):
    """The checkpoint of step 4 is newer than the snapshot of step 5."""
    folder, memory = tmp_path / "run", tmp_path / "memory"
    with rolled_back(folder, memory, train, monkeypatch) as (manager, state):
        state, _ = train.step(state, batches(1)[0])
        checkpoint.save(manager, state, {"step": "saved"})
        kept = host(state)
    with checkpoint.manager(folder, memory=memory) as manager:
        assert manager.latest_step() == 4
        found = checkpoint.restore(manager, train, init(train))
    assert found.extras == {"step": "saved"}
    assert_bits_equal(host(found.state), kept)
