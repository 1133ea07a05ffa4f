"""Chooses the checkpoint to restore: the one of a step, or the newest that is whole."""

import logging
import operator
import time
from collections.abc import Callable

import jax
import orbax.checkpoint as ocp

from ._deleted import is_deleted
from ._fault import Fault, attempt
from ._manager import is_read_only, steps
from ._read import Saved

_log = logging.getLogger(__name__)


def whole(
    manager: ocp.CheckpointManager,
    step: int | None,
    read: Callable[[int], Saved | Fault],
    last: Callable[[], Saved | None] = lambda: None,
) -> Saved:
    """Returns a whole checkpoint, the same one on all processes.

    Without a `step`, the newest whole one is taken, and newer ones are moved aside. If
    none is whole, it takes what `last` returns.
    """
    # Another job may save in the folder, and delete old checkpoints, at the same time.
    gone: frozenset[int] = frozenset()
    for tries in range(_TRIES):
        time.sleep(_PAUSE * tries)
        there = [number for number in steps(manager) if number not in gone]
        if gone and not there and step is None:
            continue  # the listing may not show the newest checkpoint yet
        found = _first_whole(manager, there, step, read, last)
        if isinstance(found, Saved):
            return found
        gone |= found
    raise OSError(
        f"the checkpoints in {manager.directory} were deleted while they were read,"
        f" {_TRIES} times in a row. Let the job that saves there keep more of them:"
        " pipejax.checkpoint.manager(folder, keep=...)."
    )


_TRIES = 10
_PAUSE = 0.05  # s


def _first_whole(
    manager: ocp.CheckpointManager,
    there: list[int],
    step: int | None,
    read: Callable[[int], Saved | Fault],
    last: Callable[[], Saved | None],
) -> Saved | frozenset[int]:
    """Returns the first whole candidate, or steps that were deleted meanwhile."""
    damaged: dict[int, str] = {}
    for number in _candidates(manager, there, step):
        found = read(number)
        if isinstance(found, Saved):
            _move_aside(manager, damaged)
            return found
        # The job that has saved a newer one may be deleting this one.
        if step is None and max(steps(manager), default=-1) > max(there):
            return frozenset()
        if is_deleted(manager, number):
            return frozenset([number])
        what = f"the checkpoint of step {number} in {manager.directory}"
        if not found.damaged:
            raise OSError(
                f"{what} cannot be read: {found.text}. Restore it again when its"
                " storage can be reached and there is enough memory."
            )
        damaged[number] = found.text
        _log.warning("%s is damaged: %s", what, found.text)
    if (kept := last()) is not None:
        _move_aside(manager, damaged)
        return kept
    said = "; ".join(f"step {number}: {text}" for number, text in damaged.items())
    raise ValueError(
        f"`manager` must have a checkpoint that is whole, got damage in"
        f" {manager.directory}, {said}. Restore"
        + (" another step." if step is not None else " a copy of the folder.")
    )


def _candidates(
    manager: ocp.CheckpointManager, there: list[int], step: int | None
) -> list[int]:
    if not there:
        raise FileNotFoundError(
            f"`manager` must have a checkpoint, got none in {manager.directory}. Save"
            " one with pipejax.checkpoint.save first."
        )
    if step is None:
        return sorted(there, reverse=True)
    if step not in there:
        raise FileNotFoundError(
            f"`step` must be the step of a checkpoint in {manager.directory}, which has"
            f" steps {there}; got {step!r}. None restores the newest."
        )
    return [operator.index(step)]


def _move_aside(manager: ocp.CheckpointManager, damaged: dict[int, str]) -> None:
    def rename() -> None:
        if jax.process_index() == 0:
            for step in damaged:
                path = manager.directory / str(step)
                path.rename(_free(manager, f"damaged-{step}"))

    # A reader beside the job that saves must change nothing in its folder.
    if damaged and not is_read_only(manager):
        fault = attempt(rename)
        if isinstance(fault, Fault):
            _log.warning("damaged checkpoints stay where they are: %s", fault.text)
        manager.reload()


def _free(manager: ocp.CheckpointManager, name: str) -> object:
    number, path = 1, manager.directory / name
    while path.exists():
        number += 1
        path = manager.directory / f"{name}-{number}"
    return path
