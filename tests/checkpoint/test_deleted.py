"""Tests a reader beside a job that deletes checkpoints: no false damage, no true lost.

Other jobs act while a checkpoint is read, so `read` of these tests acts for them.
"""

import errno
import logging
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import orbax.checkpoint as ocp
import pytest

from pipejax import checkpoint
from pipejax.checkpoint import _choose, _deleted
from pipejax.checkpoint._fault import Fault
from pipejax.checkpoint._read import Saved, Wanted

from .helpers import entries

DAMAGE = Fault(True, "`meta` is missing")
WHOLE = Saved({}, {}, {}, Wanted(None, {}, 2, ()))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with checkpoints of steps 3 and 4 that hold two files each."""
    monkeypatch.setattr(_deleted, "_PATIENCE", 0.2)
    monkeypatch.setattr(_choose, "_PAUSE", 0.0)
    for step in (3, 4):
        written(tmp_path, step)
    return tmp_path


def written(folder, step):
    (folder / str(step) / "meta").mkdir(parents=True)
    (folder / str(step) / "meta" / "metadata").write_text("{}")
    (folder / str(step) / "state").write_text("")


def found(folder, read, step=None):
    """Returns the steps that were read, in order, with what `read` does to each."""
    tried = []

    def reading(step):
        tried.append(step)
        return read(step)

    with checkpoint.manager(folder, read_only=True) as manager:
        assert _choose.whole(manager, step, reading) is WHOLE
    return tried


def test_newer_checkpoint_is_read_if_the_latest_is_being_deleted(folder, caplog):
    """The job is still deleting step 4: only one of its files is gone."""

    def read(step):
        if step == 4:
            (folder / "4" / "state").unlink()
            written(folder, 5)
            return DAMAGE
        return WHOLE

    assert found(folder, read) == [4, 5]
    assert "damaged" not in caplog.text


def test_earlier_checkpoint_is_read_if_the_latest_folder_is_gone(folder, caplog):
    def read(step):
        if step == 4:
            shutil.rmtree(folder / "4")
            return Fault(False, "OSError: [Errno 116] Stale file handle")
        return WHOLE

    assert found(folder, read) == [4, 3]
    assert "damaged" not in caplog.text


def test_newer_checkpoint_is_read_if_the_listing_is_old(folder, monkeypatch):
    """A network folder may list what is gone, and not yet what has come."""
    listings = iter([[4], [4], [4], [4, 5], [4, 5]])
    monkeypatch.setattr(_choose, "steps", lambda manager: next(listings))
    shutil.rmtree(folder / "4")
    assert found(folder, lambda step: WHOLE if step == 5 else DAMAGE) == [4, 5]


def test_requested_step_under_deletion_is_reported_as_missing(folder):
    """Its files disappear one after the other."""
    threads = []

    def delete():
        for name in ("state", "meta/metadata"):
            time.sleep(0.1)
            (folder / "3" / name).unlink()
        shutil.rmtree(folder / "3")

    def read(step):
        threads.append(threading.Thread(target=delete))
        threads[0].start()
        return DAMAGE

    rule = r"`step` must be the step of a checkpoint .*, which has steps \[4\]; got 3\."
    with pytest.raises(FileNotFoundError, match=rule):
        found(folder, read, step=3)
    threads[0].join()
    assert entries(folder) == ["4"]


def test_damage_without_deletion_is_still_reported(folder, caplog):
    with caplog.at_level(logging.WARNING, logger="pipejax"):
        assert found(folder, lambda step: DAMAGE if step == 4 else WHOLE) == [4, 3]
    assert "step 4 in" in caplog.text
    with pytest.raises(
        ValueError, match=r"got damage in .*, step 4: `meta` is missing"
    ):
        found(folder, lambda step: DAMAGE, step=4)
    with pytest.raises(
        ValueError, match=r"step 4: .*; step 3: .* a copy of the folder"
    ):
        found(folder, lambda step: DAMAGE)
    with pytest.raises(OSError, match=r"step 4 in .* cannot be read: no answer"):
        found(folder, lambda step: Fault(False, "no answer"))


def test_ten_deletions_in_a_row_end_the_search_with_an_error(folder):
    def read(step):
        written(folder, step + 1)
        shutil.rmtree(folder / str(step))
        return DAMAGE

    rule = r"were deleted while they were read, 10 times in a row\. Let the job .*keep="
    with pytest.raises(OSError, match=rule):
        found(folder, read)


def test_deletion_of_the_last_checkpoint_is_an_error(folder):
    def read(step):
        for each in (3, 4):
            shutil.rmtree(folder / str(each))
        return DAMAGE

    with pytest.raises(OSError, match="were deleted while they were read"):
        found(folder, read)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory"),
        NotADirectoryError("Path is not a directory: /run/146"),  # of Orbax itself
        OSError(errno.ESTALE, "Stale file handle"),
    ],
)
def test_folder_is_listed_again_if_files_vanish(folder, monkeypatch, error):
    """Orbax looks into each checkpoint of a listing, which may be gone by then."""
    listed, missed = ocp.CheckpointManager._load_checkpoint_infos, []

    def vanishing(self, *args, **kwargs):
        if len(missed) % 3 < 2:
            missed.append(error)
            raise error
        return listed(self, *args, **kwargs)

    monkeypatch.setattr(ocp.CheckpointManager, "_load_checkpoint_infos", vanishing)
    with checkpoint.manager(folder, read_only=True) as manager:
        assert len(missed) == 2
        missed.append(None)
        missed.append(None)
        manager.reload()
        assert manager.latest_step() == 4


def test_folder_missing_for_good_is_an_error(folder, monkeypatch):
    def missing(self, *args, **kwargs):
        raise FileNotFoundError(2, "No such file or directory")

    with checkpoint.manager(folder, read_only=True) as manager:
        monkeypatch.setattr(ocp.CheckpointManager, "_load_checkpoint_infos", missing)
        with pytest.raises(FileNotFoundError):
            manager.reload()


@pytest.mark.full  # two processes at full load for some seconds
def test_reader_restores_beside_a_job_under_way(tmp_path):
    """Runs in its own process: Orbax's threads write even to loops that are closed."""
    subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.beside", str(tmp_path)],
        cwd=pathlib.Path(__file__).parents[2],
        check=True,
    )
