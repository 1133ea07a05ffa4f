"""Tells a checkpoint that another job deletes from one that is damaged.

A job that saves deletes old checkpoints file by file. For a reader beside it, such a
checkpoint looks damaged until its folder is gone. Files of a damaged one stay.
"""

import os
import time

import jax
import orbax.checkpoint as ocp

from ._fault import Fault, agreed
from ._manager import is_read_only


def is_deleted(manager: ocp.CheckpointManager, step: int) -> bool:
    """Returns whether the folder of a checkpoint is gone, the same on all processes."""
    path, gone = manager.directory / str(step), False
    if jax.process_index() == 0:
        # Beside a read-only manager, another job may be deleting the folder file by
        # file. Buckets have no folders to look into.
        if is_read_only(manager) and "://" not in str(path):
            _wait(str(path))
        gone = not path.exists()
    return agreed(Fault(False, "deleted") if gone else None) is not None


def _wait(path: str) -> None:
    """Waits until a folder is gone, or no longer changes."""
    found, until = _contents(path), time.monotonic() + _PATIENCE
    while found and time.monotonic() < until:
        time.sleep(_PAUSE)
        now = _contents(path)
        if now != found:
            found, until = now, time.monotonic() + _PATIENCE


_PATIENCE, _PAUSE = 2.0, 0.02  # s


def _contents(path: str) -> set[str]:
    entries = ((root, *files) for root, _, files in os.walk(path))
    return {os.path.join(root, x) for root, *files in entries for x in ("", *files)}
