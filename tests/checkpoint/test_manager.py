"""Tests a manager's folder, how many checkpoints it keeps, and a second manager."""

import os
import pathlib
import threading

import numpy as np
import pytest

from pipejax import checkpoint
from pipejax._internal import leaving

from ..helpers import batches
from .helpers import entries, init, run, train_step


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "2"])
def test_keep_must_be_a_positive_integer(tmp_path, keep):
    with pytest.raises(ValueError, match=r"`keep` must be an integer of at least 1"):
        checkpoint.manager(tmp_path, keep=keep)


@pytest.mark.parametrize("folder", ["", None, 3, b"run", ["run"]])
def test_folder_must_have_a_name(folder, tmp_path, monkeypatch):
    """An empty name would stand for the working directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="`folder` must name a folder or a bucket"):
        checkpoint.manager(folder)
    assert entries(tmp_path) == []


def test_read_only_must_be_a_bool(tmp_path):
    with pytest.raises(ValueError, match="`read_only` must be True or False, got 'no'"):
        checkpoint.manager(tmp_path, read_only="no")


def test_closed_manager_is_refused(tmp_path):
    """Another manager may hold the lock of the folder now."""
    train = train_step()
    state = init(train)
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, state)
    manager.close()
    rule = r"`manager` must be open, got the one of .* after its `close\(\)`. Use it"
    with pytest.raises(ValueError, match=rule):
        checkpoint.save(manager, run(train, state, batches(1)))
    with pytest.raises(ValueError, match=rule):
        checkpoint.restore(manager, train, init(train))
    assert entries(tmp_path) == ["0"]


@pytest.mark.parametrize("manager", ["runs/first", None])
def test_manager_of_another_type_is_refused(manager):
    train = train_step()
    rule = r"`manager` must be what pipejax.checkpoint.manager\(folder\) returned, got"
    with pytest.raises(ValueError, match=rule):
        checkpoint.save(manager, init(train))
    with pytest.raises(ValueError, match=rule):
        checkpoint.restore(manager, train, init(train))


@pytest.mark.parametrize(("keep", "stay"), [(np.int64(1), {2}), (None, {0, 1, 2})])
def test_manager_keeps_the_latest_checkpoints(tmp_path, keep, stay):
    train, data = train_step(), batches(2)
    with checkpoint.manager(tmp_path, keep=keep) as manager:
        for steps in range(3):
            checkpoint.save(manager, run(train, init(train), data[:steps]))
    assert {int(name) for name in entries(tmp_path)} == stay


def test_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("notes")
    with pytest.raises(
        ValueError, match=r"`folder` must be a folder.*the file .*run\."
    ):
        checkpoint.manager(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "notes"


def test_relative_folder_is_resolved_at_creation(tmp_path, monkeypatch):
    train = train_step()
    monkeypatch.chdir(tmp_path)
    with checkpoint.manager("runs/first") as manager:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpoint.save(manager, init(train))
    assert (tmp_path / "runs/first/0").is_dir()


def test_checkpoint_of_another_manager_is_read_and_not_overwritten(tmp_path):
    train = train_step()
    first, second = init(train), run(train, init(train), batches(1))
    like = init(train)
    with checkpoint.manager(tmp_path) as one:
        checkpoint.save(one, first, {"by": "one"})
        one.wait_until_finished()
        with checkpoint.manager(tmp_path, read_only=True) as two:
            assert checkpoint.restore(two, train, like).extras == {"by": "one"}
            checkpoint.save(one, second, {"by": "one, later"})
            one.wait_until_finished()
            assert checkpoint.restore(two, train, like).extras == {"by": "one, later"}
            assert checkpoint.restore(two, train, like, step=0).extras == {"by": "one"}
            with pytest.raises(ValueError, match=r"allowed to save, .*read_only=True"):
                checkpoint.save(two, run(train, init(train), batches(2)))
    with (
        checkpoint.manager(tmp_path) as three,
        pytest.raises(ValueError, match="`state` must be of a later step"),
    ):
        checkpoint.save(three, init(train))


def test_second_writing_manager_is_refused(tmp_path):
    rule = (
        rf"`folder` must not be in use by .*process {os.getpid()} on .*read_only=True"
    )
    with checkpoint.manager(tmp_path):
        with pytest.raises(ValueError, match=rule):
            checkpoint.manager(tmp_path)
        checkpoint.manager(tmp_path / "other").close()
    checkpoint.manager(tmp_path).close()


def test_missing_folder_is_refused_if_read_only(tmp_path):
    with pytest.raises(ValueError, match="must exist if `read_only` is true"):
        checkpoint.manager(tmp_path / "none", read_only=True)
    assert entries(tmp_path) == []


def test_folder_without_write_permission_is_refused(tmp_path, monkeypatch):
    """The error comes before Orbax starts threads, which would not end."""

    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    train = train_step()
    with checkpoint.manager(tmp_path) as manager:
        monkeypatch.setattr(type(manager.directory), "mkdir", refuse)
        with pytest.raises(OSError, match=r"nothing can be written to .*Read-only"):
            checkpoint.save(manager, init(train))
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(OSError, match=r"nothing can be written to .*Read-only"):
        checkpoint.manager(tmp_path)


def test_unrelated_files_in_the_folder_are_left_alone(tmp_path):
    train = train_step()
    for name in ("notes.txt", "-1", "latest"):
        (tmp_path / name).mkdir()
    (tmp_path / "12").write_text("a file")
    before = {path.name for path in tmp_path.iterdir()}
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, init(train))
        restored = checkpoint.restore(manager, train, init(train))
    assert int(restored.state.step) == 0
    assert before < {path.name for path in pathlib.Path(tmp_path).iterdir()}


@pytest.mark.parametrize("saves", [True, False])
def test_ctrl_c_ends_the_wait_for_a_save_of_several_processes(
    tmp_path, monkeypatch, caplog, saves
):
    """It may wait for processes that were interrupted before they began to save."""
    gate, manager = threading.Event(), checkpoint.manager(tmp_path)
    close = manager.close
    monkeypatch.setattr(leaving, "HURRY", 0.05)
    monkeypatch.setattr(manager, "close", gate.wait)
    monkeypatch.setattr(manager, "is_saving_in_progress", lambda: saves)
    with monkeypatch.context() as patched:
        patched.setattr("pipejax.checkpoint._manager.jax.process_count", lambda: 2)
        with pytest.raises(KeyboardInterrupt), manager:
            raise KeyboardInterrupt
    said = "interrupted: leaving without the checkpoint under way" in caplog.text
    assert said == saves
    gate.set()
    close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_single_process_finishes_its_save_after_an_error(tmp_path, error):
    train = train_step()
    state = run(train, init(train), batches(1))

    def fail():
        with checkpoint.manager(tmp_path) as manager:
            checkpoint.save(manager, state)
            raise error

    with pytest.raises(error):
        fail()
    with checkpoint.manager(tmp_path) as manager:
        assert manager.latest_step() == int(state.step)


def test_reader_sees_newer_checkpoints_of_a_running_job(tmp_path):
    train = train_step()
    state = init(train)
    reader = checkpoint.manager(tmp_path, read_only=True)
    with checkpoint.manager(tmp_path) as manager, reader:
        assert reader.latest_step() is None
        checkpoint.save(manager, state)
        manager.wait_until_finished()
        assert reader.latest_step() == 0
        checkpoint.save(manager, run(train, state, batches(1)))
        manager.wait_until_finished()
        assert reader.latest_step() == 1


def test_unfinished_checkpoint_of_a_killed_job_is_removed(tmp_path):
    (tmp_path / "7.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    checkpoint.manager(tmp_path, read_only=True).close()
    assert entries(tmp_path) == ["7.orbax-checkpoint-tmp"]
    checkpoint.manager(tmp_path).close()
    assert entries(tmp_path) == []


def test_barriers_of_two_managers_have_different_names(tmp_path):
    with (
        checkpoint.manager(tmp_path / "last") as last,
        checkpoint.manager(tmp_path / "best") as best,
    ):
        names = {
            x._options.multiprocessing_options.barrier_sync_key_prefix
            for x in (last, best)
        }
    assert len(names) == 2
