"""Tests which snapshots a process keeps, and when it stops to."""

import logging
import os
import pathlib

import pytest

from pipejax import checkpoint
from pipejax.checkpoint._snapshots import _folder, _keeper, _pace
from pipejax.checkpoint._snapshots._messages import Outcome

from ...helpers import batches
from ..helpers import init, train_step
from .folders import grow_old, left
from .runs import broken_off, every_step, run, settled


@pytest.fixture(scope="module")
def train():
    return train_step(2)


@pytest.fixture
def memory(tmp_path):
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def files(memory):
    return sorted(path.name for path in memory.glob("*/*") if path.suffix)


def test_two_snapshots_are_kept_and_freed(tmp_path, memory, train, monkeypatch):
    every_step(monkeypatch)
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        run(manager, train, init(train), batches(5))
        settled(manager)
        names = ["part-0-0.data", "part-0-0.json", "part-0-1.data", "part-0-1.json"]
        assert files(memory) == names
    assert [*memory.iterdir()] == []


def test_manager_may_be_closed_twice(tmp_path, memory, train):
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        run(manager, train, init(train), batches(1))
    with checkpoint.manager(tmp_path / "run", memory=memory) as other:
        manager.close()
        run(other, train, init(train), batches(1))
        assert files(memory) != []


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        *((RuntimeError(), True), (SystemExit(75), True)),
        *((SystemExit(0), False), (KeyboardInterrupt(), False)),
    ],
)
def test_memory_is_kept_only_after_a_failure(tmp_path, memory, train, error, kept):
    def fails():
        with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
            run(manager, train, init(train), batches(1))
            raise error

    with pytest.raises(type(error)):
        fails()
    assert bool([*memory.iterdir()]) is kept


def test_memory_is_kept_if_the_last_save_fails(tmp_path, memory, train, monkeypatch):
    def fails(self):
        raise OSError("No space left on device")

    def closed():
        with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
            run(manager, train, init(train), batches(1))
            monkeypatch.setattr(type(manager).__bases__[0], "close", fails)

    with pytest.raises(OSError, match="No space left"):
        closed()
    assert [*memory.iterdir()] != []


def test_costs_decide_when_the_next_snapshot_is(tmp_path, memory, train, monkeypatch):
    asked = []

    def steps_between(stops, beside, step, faults):
        asked.append((stops > 0, beside > 0, step > 0, faults))
        return 3

    monkeypatch.setattr(_pace, "steps_between", steps_between)
    state = init(train)
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        copied = []
        for batch in batches(15):
            state, _ = train.step(state, batch)
            copied.append(checkpoint.snapshot(manager, state))
            settled(manager)
    first = 1 + _pace.FIRST
    assert [n for n, done in enumerate(copied, 1) if done] == [1, *range(first, 16, 3)]
    assert {*asked} == {(True, True, True, 1 / 24)}


def test_slow_snapshot_delays_no_later_snapshot(tmp_path, memory, train, monkeypatch):
    asked = []
    monkeypatch.setattr(_pace, "steps_between", lambda *x: asked.append(x[:2]) or 1)
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        run(manager, train, init(train), batches(1))
        settled(manager)
        for seconds in (1.0, 9.0, 2.0, 3.0, 4.0):
            manager.keeper.is_due()
            costs = ((seconds, 2 * seconds), (0.0, 0.0))
            manager.keeper.outcomes = [Outcome(*each) for each in costs]
            manager.keeper._decision()
    assert asked == [(1.0, 2.0), (1.0, 2.0), (1.0, 2.0), (2.0, 4.0), (2.0, 4.0)]


def test_snapshot_under_way_is_not_overtaken(tmp_path, memory, train, monkeypatch):
    every_step(monkeypatch)
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        state, _ = train.step(init(train), batches(1)[0])
        assert checkpoint.snapshot(manager, state)
        settled(manager)
        monkeypatch.setattr(manager.keeper._under_way, "is_alive", lambda: True)
        assert not checkpoint.snapshot(manager, state)


@pytest.mark.parametrize("where", ["missing", "file"])
def test_unusable_folder_turns_snapshots_off(tmp_path, train, caplog, where):
    (tmp_path / "file").touch()
    with checkpoint.manager(tmp_path / "run", memory=tmp_path / where) as manager:
        run(manager, train, init(train), batches(2))
    said = [x.getMessage() for x in caplog.records if x.levelno == logging.WARNING]
    assert len(said) == 1
    assert f"no more snapshots in {tmp_path / where}" in said[0]
    assert "goes on from the newest checkpoint on disk" in said[0]


def test_memory_without_room_turns_snapshots_off(
    tmp_path, memory, train, caplog, monkeypatch
):
    """The snapshot before stays, and the training goes on."""
    every_step(monkeypatch)
    with broken_off(tmp_path / "run", memory) as manager:
        state = run(manager, train, init(train), batches(1))
        settled(manager)

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            run(manager, train, state, batches(4)[1:])
    said = [x.getMessage() for x in caplog.records if x.levelno == logging.WARNING]
    assert len(said) == 1
    assert "No space left on device (process 0)" in said[0]
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        assert manager.latest_step() == 1


def test_memory_of_an_abandoned_job_makes_room(tmp_path, memory, train, monkeypatch):
    """The memory of a job that may be between two attempts stays."""
    abandoned, other = left(memory, "old", 0.0), left(memory, "new", 0.0)
    reserve, tries = _keeper._file.reserve, []

    def full_at_first(path, size):
        tries.append(size)
        if len(tries) == 1:
            raise OSError(28, "No space left on device")
        return reserve(path, size)

    monkeypatch.setattr(_keeper._file, "reserve", full_at_first)
    with checkpoint.manager(tmp_path / "own", memory=memory) as manager:
        grow_old(abandoned, 700.0)
        run(manager, train, init(train), batches(1))
        assert not abandoned.exists()
        assert other.exists()


def test_size_is_stated_before_the_first_snapshot(tmp_path, memory, train, caplog):
    caplog.set_level(logging.INFO, "pipejax")
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        run(manager, train, init(train), batches(1))
        size = next(memory.glob("*/part-0-0.data")).stat().st_size
    said = f"a snapshot takes {size / 1e9:.3g} GB of {memory}, in part-0-0"
    assert any(said in record.getMessage() for record in caplog.records)


def test_snapshot_without_outcomes_is_the_last(
    tmp_path, memory, train, monkeypatch, caplog
):
    """Process 0 has waited for the others in vain."""
    every_step(monkeypatch)
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        state = run(manager, train, init(train), batches(2))
        manager.keeper.settle()
        manager.keeper.outcomes = []
        run(manager, train, state, batches(4)[2:])
        assert manager.keeper.off == "a snapshot was not complete in time"
    assert "no more snapshots in" in caplog.text


def test_snapshots_of_different_extras_are_given_up(
    tmp_path, memory, train, monkeypatch, caplog
):
    """They would never count, because no process could say where to go on."""
    every_step(monkeypatch)
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        state = run(manager, train, init(train), batches(1))
        settled(manager)
        assert len({each.state for each in manager.keeper.outcomes}) == 1
        outcomes = [Outcome(0.0, 0.0, "", name) for name in ("one", "another")]
        manager.keeper.outcomes = outcomes
        run(manager, train, state, batches(1))
        assert not manager.keeper.is_due()
    assert "`extras` must be the same on all processes" in caplog.text


def test_closed_manager_maps_no_memory(tmp_path, memory, train):
    """A page of a removed file stays as long as it is mapped."""
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        run(manager, train, init(train), batches(1))
        settled(manager)
        assert str(memory) in pathlib.Path("/proc/self/maps").read_text()
    assert str(memory) not in pathlib.Path("/proc/self/maps").read_text()


def test_folder_of_a_running_job_never_grows_old(tmp_path, memory, train, monkeypatch):
    """Its snapshots may be further apart than the time until it is removed."""
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        state = init(train)
        checkpoint.snapshot(manager, state)
        settled(manager)
        (folder,) = memory.iterdir()
        grow_old(folder, 1e4)
        checkpoint.snapshot(manager, state)
        assert _folder._age(folder) > _folder.ABANDONED
        monkeypatch.setattr(_keeper, "_ALIVE", 0.0)
        checkpoint.snapshot(manager, state)
        assert _folder._age(folder) < _folder.ABANDONED
