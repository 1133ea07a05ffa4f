"""Locks the folder of a run, so that a second job cannot save there too.

The lock is the kernel's, `flock` on the file `.lock`, which says who has held it last.
When the process that holds it ends, however it ends, the lock is free.
"""

import errno
import fcntl
import json
import logging
import os
import pathlib
import socket
from typing import Any

from pipejax._internal.forks import closed_in_children

_log = logging.getLogger(__name__)

NAME = ".lock"
# The file system has no locks.
_WITHOUT = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Lock:
    """The lock of a folder.

    Attributes:
      held: Whether the file system has locks, so that no other job saves there.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        """Raises a `ValueError` if another manager holds the lock."""
        self.held = True
        path = folder / NAME
        self._file: Any = open(path, "a+")  # noqa: SIM115 - held until `release`
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(
                f"`folder` must not be in use by another manager that saves there;"
                f" {folder} is, by {_holder(path)}. Choose another folder, end that"
                " job, or close that manager. To restore only, pass `read_only=True`."
                f" If that host is gone, remove {path}."
            ) from error
        except OSError as error:
            if error.errno not in _WITHOUT:
                raise
            self.held = False
            said = "%s cannot be locked: %s. See that no second job saves there."
            _log.warning(said, folder, error)
        # A forked child would still hold the lock when this process is gone.
        closed_in_children(self._file)
        self._file.truncate(0)
        self._file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        self._file.flush()

    def release(self) -> None:
        self._file.close()


def _holder(path: pathlib.Path) -> str:
    try:
        held = json.loads(path.read_text())
        return f"process {held['pid']} on {held['host']}"
    except (ValueError, KeyError, TypeError):
        return "a process that has not said its name"
