"""The folder of a job in the memory of a host, and what other jobs have left there.

A job is known by a number that process 0 draws once and keeps in the folder of the
checkpoints, so a run that begins anew in an emptied folder is another job, and so is
one in a copy of the folder. Every process holds a lock as long as it runs, which the
kernel frees when it ends.
"""

import contextlib
import fcntl
import logging
import os
import pathlib
import shutil
import time
from typing import Any

from etils import epath

from pipejax._internal import proofs
from pipejax._internal.forks import closed_in_children

_log = logging.getLogger("pipejax")

_PREFIX = "pipejax-"
_JOB = "job"  # without a dot, so that `rm folder/*` removes it
ABANDONED = 600.0
"""Seconds for which a job has not run before its folder is removed."""
_PATIENCE = 10.0  # seconds until an earlier process of the same rank must have ended
_PERIOD = 0.05


def job_of(checkpoints: Any) -> str:
    """Returns the number of the job that saves in a folder, drawn if there is none."""
    path = epath.Path(checkpoints) / _JOB
    if path.exists():
        number, *inode = path.read_text().split() or [""]
        if number.isalnum() and inode == [_inode(path)]:
            return number
        if number.isalnum():
            _log.warning(
                "%s is a copy, or lies on a file system that does not keep the numbers"
                " of its files: snapshots that were made before are not used",
                checkpoints,
            )
    drawn = proofs.drawn()
    path.touch()  # and has an inode
    path.write_text(f"{drawn} {_inode(path)}")
    return drawn


def _inode(path: epath.Path) -> str:
    """Returns the number by which a file differs from its copies; 0 in a bucket."""
    try:
        return str(os.stat(path).st_ino)
    except OSError:
        return "0"


class Folder:
    """The folder of a job on this host, which is there until `close`.

    Attributes:
      path: The folder.
    """

    def __init__(self, memory: pathlib.Path, job: str, rank: int) -> None:
        """Raises an `OSError` if there can be no such folder."""
        self.path = memory / f"{_PREFIX}{job}"
        self.path.mkdir(mode=0o700, exist_ok=True)
        if self.path.stat().st_uid != os.getuid():
            raise PermissionError(f"{self.path} belongs to another user")
        self._lock = _locked(self.path / f"lock-{rank}")
        remove_abandoned(memory, ABANDONED, but=self.path)

    def close(self, *, remove: bool) -> None:
        """Frees the lock. The last process of this host may remove the folder."""
        self._lock.close()
        # Another process of this host may remove it at the same time.
        with contextlib.suppress(FileNotFoundError):
            if remove and not _in_use(self.path):
                shutil.rmtree(self.path, ignore_errors=True)


def remove_abandoned(
    memory: pathlib.Path, seconds: float, but: pathlib.Path | None = None
) -> None:
    """Removes the folders of jobs of which no process runs and that are old enough."""
    for path in memory.glob(f"{_PREFIX}*"):
        # Folders of other users cannot be opened.
        with contextlib.suppress(OSError):
            # Every process of a job has left a lock; other folders have none.
            jobs = path != but and any(path.glob("lock-*"))
            if jobs and _age(path) > seconds and not _in_use(path):
                shutil.rmtree(path)
                _log.info(
                    "removed the snapshots of a job that no longer runs: %s", path
                )


def _age(path: pathlib.Path) -> float:
    """Returns the seconds since anything in a folder was written."""
    return time.time() - max(each.stat().st_mtime for each in (path, *path.iterdir()))


def _in_use(path: pathlib.Path) -> bool:
    for name in path.glob("lock-*"):
        with open(name) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def _locked(path: pathlib.Path) -> Any:
    file: Any = open(path, "w")  # noqa: SIM115 - held until `close`
    closed_in_children(file)
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < until:
                time.sleep(_PERIOD)
                continue
            file.close()
            raise BlockingIOError(
                f"another process of this job and rank still runs on this host: it"
                f" holds {path}"
            ) from error
        return file
