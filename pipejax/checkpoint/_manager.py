"""Makes the Orbax manager of a run's checkpoints, and lists their steps."""

import contextlib
import logging
import operator
import os
import pathlib
import shutil
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from pipejax._core.executors import join
from pipejax._internal import leaving
from pipejax._internal.fault_rate import faults_per_hour
from pipejax._internal.integers import is_integer

from ._fault import all_or_none, while_files_vanish, writing_to
from ._gather import gathered
from ._lock import Lock
from ._meta import digest
from ._shared_folder import check_shared
from ._snapshots import Keeper

_log = logging.getLogger("pipejax")


class LockedManager(ocp.CheckpointManager):
    def __init__(
        self, *args: Any, lock: Lock | None, keeper: Keeper | None, **kwargs: Any
    ) -> None:
        self._lock, self.read_only = lock, kwargs["options"].read_only
        self.closed, self.keeper, self._goes_on = False, keeper, False
        super().__init__(*args, **kwargs)

    def latest_step(self) -> int | None:
        # A program asks for it to find out whether there is anything to restore. Beside
        # a job that saves, it asks again and again, and Orbax lists the folder once.
        if self.read_only and jax.process_count() == 1:
            self.reload()
        own = super().latest_step()
        newest = None if self.keeper is None else self.keeper.newest()
        found = [step for step in (own, newest) if step is not None]
        return max(found, default=None)

    def reload(self) -> None:
        # Another job may delete checkpoints in the folder meanwhile.
        while_files_vanish(super().reload)

    def delete(self, step: int) -> None:
        join()  # Orbax has a collective of its own.
        super().delete(step)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error, the job may be started again, and then needs its snapshots.
        stopped = isinstance(error, SystemExit) and bool(error.code)
        self._goes_on = stopped or isinstance(error, Exception)
        # After Ctrl-C, a save may be left unfinished.
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        if not interrupted or jax.process_count() == 1:
            self.close()
        # The save may wait for processes that were interrupted before they began it.
        # What it has written is then no checkpoint, as after SIGKILL.
        elif (
            not leaving.within(leaving.HURRY, self.close)
            and self.is_saving_in_progress()
        ):
            _log.error("interrupted: leaving without the checkpoint under way")

    def close(self) -> None:
        if self.closed:  # Orbax closes a manager again when Python ends
            return
        done = False
        try:
            super().close()
            done = True
        finally:
            self.closed = True
            if self.keeper is not None:
                self.keeper.close(remove=done and not self._goes_on)
            if self._lock is not None:
                self._lock.release()


def manager(
    folder: os.PathLike[str] | str,
    keep: int | None = 2,
    *,
    read_only: bool = False,
    memory: os.PathLike[str] | str | None = None,
) -> ocp.CheckpointManager:
    """Makes an Orbax manager for the checkpoints of one run.

    Unlike a plain `orbax.checkpoint.CheckpointManager`, the manager knows the parts of
    a pipejax checkpoint, and lists the folder on one process only.

    Each of several processes must make a manager of the same folder. While the manager
    is open, process 0 holds a lock on the folder, so that a second job which would save
    there is refused at its start. A process that ends, even by SIGKILL, leaves no lock
    behind. Buckets have no locks. With the lock, process 0 removes checkpoints that a
    killed job has left unfinished.

    Args:
      folder: Folder of the checkpoints, or the URL of a bucket (`gs://bucket/run`). It
        is created if it does not exist.
      keep: Number of checkpoints to keep, at least 1. Older ones are deleted. `None`
        keeps all.
      read_only: Whether the manager only restores. It then needs no lock, so that an
        evaluation can read the checkpoints of a running job. Its `latest_step()` sees
        newer checkpoints; on several processes, all call `reload()` before.
      memory: An existing folder that outlives the process, such as `/dev/shm`, in which
        `snapshot` keeps states. It takes twice the bytes of what this process holds of
        a state, and twice those that it copies for another host. They are freed when
        the manager is closed, unless an error has left its `with` statement. The next
        start on this host removes what jobs have left that have not run for ten
        minutes. `None` makes no snapshots.

    Returns:
      The manager, for `save` and `restore`. Use it in a `with` statement, or call its
      `close()` at the end, to wait for the last write.

    Raises:
      ValueError: If an argument breaks its rule, another manager that saves in `folder`
        is open, a process does not see what process 0 writes there, or `read_only` is
        true and `folder` does not exist.
      OSError: If nothing can be written to `folder`.
    """
    if not isinstance(read_only, bool):
        raise ValueError(f"`read_only` must be True or False, got {read_only!r}.")
    if keep is not None and not is_integer(keep, 1):
        raise ValueError(
            f"`keep` must be an integer of at least 1, got {keep!r}. None keeps all"
            " checkpoints."
        )
    if memory is not None:
        _check_memory(memory, read_only)
    place = _absolute(folder)
    if read_only and not epath.Path(place).is_dir():
        raise ValueError(
            f"`folder` must exist if `read_only` is true, got {place}. Give the folder"
            " of a run that has saved a checkpoint."
        )
    with contextlib.ExitStack() as stack:
        lock = None if read_only else _locked(place)
        if lock is not None:
            stack.callback(lock.release)
        if not read_only:
            check_shared(place)
        keeper = None
        if memory is not None:
            keeper = Keeper(pathlib.Path(memory).absolute(), place, faults_per_hour())
            stack.callback(keeper.close, remove=False)
        made = _opened(place, keep, read_only, lock, keeper)
        stack.pop_all()
    return made


def _opened(
    place: str,
    keep: int | None,
    read_only: bool,
    lock: Lock | None,
    keeper: Keeper | None,
) -> ocp.CheckpointManager:
    # Barriers of two managers would otherwise have the same names.
    prefix = digest(gathered(place)[0])[:16]

    def opened() -> ocp.CheckpointManager:
        return LockedManager(
            place,
            lock=lock,
            keeper=keeper,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=None if keep is None else operator.index(keep),
                read_only=read_only,
                # Processes that list the same network folder may see different files.
                single_host_load_and_broadcast=True,
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    barrier_sync_key_prefix=prefix
                ),
                # Its barrier would wait for a process that cannot list the folder.
                save_root_metadata=False,
            ),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
                "extras": ocp.JsonCheckpointHandler(),
            },
        )

    return while_files_vanish(opened)


def _locked(place: str) -> Lock | None:
    def lock() -> Lock | None:
        if jax.process_index() != 0 or "://" in place:
            return None
        path = pathlib.Path(place)
        with writing_to(place):
            path.mkdir(parents=True, exist_ok=True)
            made = Lock(path)
            # A job that was killed has left what it was writing.
            for unfinished in path.glob("*.orbax-checkpoint-tmp*") if made.held else ():
                shutil.rmtree(unfinished, ignore_errors=True)
            return made

    return all_or_none(lock)


def check_manager(manager: Any) -> None:
    if not isinstance(manager, ocp.CheckpointManager):
        raise ValueError(
            "`manager` must be what pipejax.checkpoint.manager(folder) returned, got"
            f" {type(manager).__name__}. Make a manager of the folder first."
        )
    if isinstance(manager, LockedManager) and manager.closed:
        raise ValueError(
            f"`manager` must be open, got the one of {manager.directory} after its"
            " `close()`. Use it inside its `with` statement, or make another with"
            " pipejax.checkpoint.manager(folder)."
        )


def keeper_of(manager: ocp.CheckpointManager) -> Keeper | None:
    return manager.keeper if isinstance(manager, LockedManager) else None


def is_read_only(manager: ocp.CheckpointManager) -> bool:
    return isinstance(manager, LockedManager) and manager.read_only


def steps(manager: ocp.CheckpointManager) -> list[int]:
    manager.wait_until_finished()
    # The manager's own list does not show what another manager has saved or deleted.
    manager.reload()
    return [int(step) for step in manager.all_steps()]


def _check_memory(memory: Any, read_only: bool) -> None:
    if not isinstance(memory, str | os.PathLike) or not os.fspath(memory):
        raise ValueError(
            f"`memory` must name a folder, or be None, got {memory!r}. Pass '/dev/shm'."
        )
    if read_only:
        raise ValueError(
            "`memory` must be None if `read_only` is true, got"
            f" {os.fspath(memory)!r}. Only the job that saves makes snapshots."
        )


def _absolute(folder: os.PathLike[str] | str) -> str:
    name = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"`folder` must name a folder or a bucket, got {folder!r}. Pass a path such"
            " as 'runs/first'; '.' stands for the working directory."
        )
    if "://" in name:
        return name
    path = pathlib.Path(name).absolute()
    if path.exists() and not path.is_dir():
        raise ValueError(
            f"`folder` must be a folder for checkpoints, got the file {path}. Choose"
            " another name, or move the file away."
        )
    return str(path)
