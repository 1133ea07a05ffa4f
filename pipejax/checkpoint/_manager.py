"""Makes the Orbax manager of a run's checkpoints, and lists their steps."""

import operator
import os
import pathlib

import orbax.checkpoint as ocp

from pipejax.integers import is_integer


def manager(
    folder: os.PathLike[str] | str, keep: int | None = 2
) -> ocp.CheckpointManager:
    """Makes an Orbax manager for the checkpoints of one run.

    Unlike a plain `orbax.checkpoint.CheckpointManager`, the returned manager knows the
    parts of a pipejax checkpoint, keeps only the latest ones, and lists the folder on
    one process only.

    If there are several processes, each of them must make a manager of the same folder.
    Only one manager should save in a folder at a time.

    Args:
      folder: Folder of the checkpoints, or the URL of a bucket (`gs://bucket/run`). It
        is created if it does not exist.
      keep: Number of checkpoints to keep, at least 1. Older ones are deleted. `None`
        keeps all.

    Returns:
      An `orbax.checkpoint.CheckpointManager`, for `save` and `restore`. It writes
      checkpoints while the training continues. Use it in a `with` statement, or call
      its `close()` at the end, to wait for the last write.

    Raises:
      ValueError: If `keep` is not an integer of at least 1, or `folder` is a file.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder, manager(folder) as checkpoints:
      ...     print(checkpoints.latest_step())
      None
    """
    if keep is not None and not is_integer(keep, 1):
        raise ValueError(
            f"`keep` must be an integer of at least 1, got {keep!r}. None keeps all"
            " checkpoints."
        )
    return ocp.CheckpointManager(
        _absolute(folder),
        options=ocp.CheckpointManagerOptions(
            max_to_keep=None if keep is None else operator.index(keep),
            # Processes that list the same network folder may see different files.
            single_host_load_and_broadcast=True,
        ),
        item_handlers={
            "state": ocp.StandardCheckpointHandler(),
            "meta": ocp.JsonCheckpointHandler(),
            "extras": ocp.JsonCheckpointHandler(),
        },
    )


def steps(manager: ocp.CheckpointManager) -> list[int]:
    """Waits for a running save, and returns the steps of the checkpoints in the folder.

    The manager's own list may be out of date, because another manager may have saved or
    deleted checkpoints, so the folder is read again.
    """
    manager.wait_until_finished()
    manager.reload()
    return [int(step) for step in manager.all_steps()]


def _absolute(folder: os.PathLike[str] | str) -> str:
    """Returns the absolute path of a folder; returns a URL unchanged.

    Raises:
      ValueError: If there is a file at the path.

    Examples:
      >>> _absolute("gs://bucket/run"), _absolute("/tmp/run")
      ('gs://bucket/run', '/tmp/run')
    """
    name = os.fspath(folder)
    if "://" in name:
        return name
    path = pathlib.Path(name).absolute()
    if path.exists() and not path.is_dir():
        raise ValueError(
            f"`folder` must be a folder for checkpoints, got the file {path}. Choose"
            " another name, or move the file away."
        )
    return str(path)
