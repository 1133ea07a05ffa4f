"""The Orbax manager of a run's checkpoints, and which steps it has."""

import operator
import os
import pathlib

import orbax.checkpoint as ocp

from pipejax.integers import is_integer


def manager(
    folder: os.PathLike[str] | str, keep: int | None = 2
) -> ocp.CheckpointManager:
    """Makes an Orbax manager for the checkpoints of one run; a context manager.

    On several processes all of them make one, with the same folder. Only one manager at
    a time should save in a folder.

    Args:
      folder: where the checkpoints lie, or the URL of a bucket (`gs://bucket/run`);
        made if it is not there.
      keep: how many of the latest stay; `None` keeps all.

    Returns:
      An `orbax.checkpoint.CheckpointManager` that saves beside the training.

    Raises:
      ValueError: if `keep` is not positive, or `folder` is a file.
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
            # Processes that list a network folder may differ in what they see.
            single_host_load_and_broadcast=True,
        ),
        item_handlers={
            "state": ocp.StandardCheckpointHandler(),
            "meta": ocp.JsonCheckpointHandler(),
            "extras": ocp.JsonCheckpointHandler(),
        },
    )


def steps(manager: ocp.CheckpointManager) -> list[int]:
    """Returns the steps in the folder, once a save under way has ended.

    The manager's own list may be old: another manager can have saved or deleted since.
    """
    manager.wait_until_finished()
    manager.reload()
    return [int(step) for step in manager.all_steps()]


def _absolute(folder: os.PathLike[str] | str) -> str:
    """Returns the absolute path, or the URL as it is.

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
