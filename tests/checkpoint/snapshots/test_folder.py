"""Tests which folders of jobs are kept, and which are removed."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from pipejax.checkpoint._snapshots import _folder
from pipejax.checkpoint._snapshots._folder import Folder, job_of, remove_abandoned

from .folders import grow_old, left

HOLDS = """
import pathlib, sys, time
from pipejax.checkpoint._snapshots._folder import Folder
folder = Folder(pathlib.Path(sys.argv[1]), "other", 0)
print("held", flush=True)
time.sleep(600)
"""


def test_job_keeps_its_number_as_long_as_its_checkpoints(tmp_path):
    first = job_of(tmp_path)
    assert job_of(tmp_path) == first
    for path in tmp_path.glob("*"):  # as `rm folder/*` does
        path.unlink()
    assert job_of(tmp_path) != first


def test_copied_folder_of_checkpoints_is_another_job(tmp_path):
    first = job_of(tmp_path)
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert job_of(tmp_path / "copy") != first
    (tmp_path / "job").rename(tmp_path / "copy" / "job")
    assert job_of(tmp_path / "copy") == first


def test_old_folder_of_another_job_is_removed(tmp_path):
    old, new = left(tmp_path, "old", 700.0), left(tmp_path, "new", 500.0)
    others = [tmp_path / "other", tmp_path / "pipejax-main"]
    for other in others:
        other.mkdir()
        (other / "README.md").touch()
        grow_old(other, 1e6)
    folder = Folder(tmp_path, "own", 0)
    assert not old.exists()
    assert new.exists()
    assert all((other / "README.md").exists() for other in others)
    folder.close(remove=True)


def test_own_folder_is_kept_however_old(tmp_path):
    path = left(tmp_path, "own", 1e6)
    (path / "part-0-0.json").touch()
    folder = Folder(tmp_path, "own", 0)
    assert (path / "part-0-0.json").exists()
    folder.close(remove=False)
    assert path.exists()


def test_folder_of_a_running_job_is_kept_until_its_end(tmp_path):
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        remove_abandoned(tmp_path, -1.0)
        assert (tmp_path / "pipejax-other").exists()
        process.kill()
    remove_abandoned(tmp_path, -1.0)
    assert not (tmp_path / "pipejax-other").exists()


def test_processes_may_remove_the_folder_at_the_same_time(tmp_path, monkeypatch):
    """The files may be gone between the listing and the look at them."""
    folder, glob = Folder(tmp_path, "own", 0), pathlib.Path.glob

    def listed(path, pattern):
        found = [*glob(path, pattern)]
        shutil.rmtree(path)
        return found

    monkeypatch.setattr(pathlib.Path, "glob", listed)
    folder.close(remove=True)
    assert not folder.path.exists()


def test_last_process_of_a_host_removes_the_folder(tmp_path):
    first, second = Folder(tmp_path, "own", 0), Folder(tmp_path, "own", 1)
    first.close(remove=True)
    assert first.path.exists()
    second.close(remove=True)
    assert not first.path.exists()


def test_second_process_of_a_rank_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_folder, "_PATIENCE", 0.1)
    first = Folder(tmp_path, "own", 0)
    with pytest.raises(BlockingIOError, match="another process of this job and rank"):
        Folder(tmp_path, "own", 0)
    first.close(remove=True)


def test_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    left(tmp_path, "own", 0.0)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        Folder(tmp_path, "own", 0)


def test_checkpoints_without_their_number_say_so(tmp_path, caplog):
    job_of(tmp_path)
    shutil.copytree(tmp_path, tmp_path / "copy")
    job_of(tmp_path / "copy")
    assert "snapshots that were made before are not used" in caplog.text
