"""Tests a manager's folder, how many checkpoints it keeps, and a second manager."""

import pathlib

import numpy as np
import pytest

from pipejax import checkpoint

from ..helpers import batches
from .helpers import init, run, train_step


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "2"])
def test_keep_is_positive(tmp_path, keep):
    with pytest.raises(ValueError, match=r"`keep` must be an integer of at least 1"):
        checkpoint.manager(tmp_path, keep=keep)


@pytest.mark.parametrize(("keep", "stay"), [(np.int64(1), {2}), (None, {0, 1, 2})])
def test_the_latest_stay(tmp_path, keep, stay):
    train, data = train_step(), batches(2)
    with checkpoint.manager(tmp_path, keep=keep) as manager:
        for steps in range(3):
            checkpoint.save(manager, run(train, init(train), data[:steps]))
    assert {int(path.name) for path in tmp_path.iterdir()} == stay


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "run").write_text("notes")
    with pytest.raises(
        ValueError, match=r"`folder` must be a folder.*the file .*run\."
    ):
        checkpoint.manager(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "notes"


def test_a_relative_folder_is_that_of_the_moment(tmp_path, monkeypatch):
    train = train_step()
    monkeypatch.chdir(tmp_path)
    with checkpoint.manager("runs/first") as manager:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpoint.save(manager, init(train))
    assert (tmp_path / "runs/first/0").is_dir()


def test_what_another_manager_saved_is_seen_and_not_overwritten(tmp_path):
    train = train_step()
    first, second = init(train), run(train, init(train), batches(1))
    like = init(train)
    with checkpoint.manager(tmp_path) as one, checkpoint.manager(tmp_path) as two:
        checkpoint.save(one, first, {"by": "one"})
        one.wait_until_finished()
        with pytest.raises(ValueError, match="`state` must be of a later step"):
            checkpoint.save(two, first, {"by": "two"})
        assert checkpoint.restore(two, train, like).extras == {"by": "one"}
        checkpoint.save(two, second, {"by": "two"})
        two.wait_until_finished()
        assert checkpoint.restore(one, train, like).extras == {"by": "two"}
        assert checkpoint.restore(one, train, like, step=0).extras == {"by": "one"}


def test_other_files_beside_are_left_alone(tmp_path):
    train = train_step()
    for name in ("notes.txt", "-1", "7.orbax-checkpoint-tmp", "latest"):
        (tmp_path / name).mkdir()
    (tmp_path / "12").write_text("a file")
    before = {path.name for path in tmp_path.iterdir()}
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, init(train))
        restored = checkpoint.restore(manager, train, init(train))
    assert int(restored.state.step) == 0
    assert before < {path.name for path in pathlib.Path(tmp_path).iterdir()}
