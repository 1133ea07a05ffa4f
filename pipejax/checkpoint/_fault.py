"""Faults of checkpoints, on which all processes agree before any of them goes on."""

import contextlib
import errno
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from pipejax._core.executors import join

T = TypeVar("T")
_MOST = 1000  # bytes of a description


class DamagedError(ValueError):
    """Raised if a part of a checkpoint is missing or is not what was saved."""


class Fault(NamedTuple):
    """Why a checkpoint cannot be restored."""

    damaged: bool  # whether what is read or given is at fault, and not the storage
    text: str


def attempt(read: Callable[[], T]) -> T | Fault:
    """Calls `read` on all processes; if it fails on any, returns a fault on all.

    `read` must have no collectives, since it may fail on some processes only.
    """
    fault = None
    try:
        result = read()
    except Exception as error:  # those that are not about reading are raised again
        fault = _fault_of(error)
        if fault is None:
            raise
    return agreed(fault) or result


def all_or_none(action: Callable[[], T]) -> T:
    """Returns the result of an action, or raises its error on all processes."""
    fault, cause = None, None
    try:
        result = action()
    except (OSError, ValueError) as error:
        fault, cause = Fault(isinstance(error, ValueError), str(error)), error
    if fault := agreed(fault):
        raise (ValueError if fault.damaged else OSError)(fault.text) from cause
    return result


def while_files_vanish(action: Callable[[], T]) -> T:
    """Calls `action` again on all processes if it has missed a file on any."""
    # Orbax lists a folder and then looks into what it has found there, which another
    # job may have deleted meanwhile.
    join()  # The action may have collectives of its own.
    for _ in range(_TRIES):
        missed = None
        try:
            result = action()
        except OSError as error:
            # Orbax raises some of these by itself, without a number.
            gone = isinstance(error, FileNotFoundError | NotADirectoryError)
            if not gone and error.errno != errno.ESTALE:
                raise
            missed = Fault(False, str(error))
        if agreed(missed) is None:
            return result
    return action()


_TRIES = 10


@contextlib.contextmanager
def writing_to(folder: Any) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"nothing can be written to {folder}: {error}. Choose another folder, or"
            " make this one writable."
        ) from error


def agreed(fault: Fault | None) -> Fault | None:
    """Returns the first fault of any process. Every process must call it."""
    if jax.process_count() == 1:
        return fault
    join()  # Only one collective may run at a time.
    own = b"" if fault is None else bytes([1 + fault.damaged]) + fault.text.encode()
    # The first byte is 0 without a fault, and otherwise 1 or 2.
    padded = np.zeros(_MOST, np.uint8)
    padded[: len(own)] = np.frombuffer(own[:_MOST], np.uint8)[:_MOST]
    every = multihost_utils.process_allgather(padded)
    for process, row in enumerate(every):
        if row[0]:
            text = bytes(row[1:]).rstrip(b"\0").decode(errors="ignore")
            return Fault(bool(row[0] - 1), f"{text} (process {process})")
    return None


def _fault_of(error: Exception) -> Fault | None:
    """Returns a fault, or `None` for an error that is not about reading."""
    if isinstance(error, DamagedError):
        return Fault(True, str(error))
    root: BaseException = error
    while root.__cause__ is not None:  # Orbax wraps the errors of TensorStore
        root = root.__cause__
    text = _described(root)
    if isinstance(root, OSError) and not isinstance(root, _MISSING):
        return Fault(False, text)
    if isinstance(root, MemoryError | jax.errors.JaxRuntimeError):
        return Fault(False, text)
    if isinstance(root, _UNREADABLE) or type(root) is Exception:
        return Fault(not _is_elsewhere(str(root)), text)
    return None


_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# Orbax and TensorStore raise these for bytes that they cannot interpret.
_UNREADABLE = (*_MISSING, KeyError, TypeError, ValueError, AttributeError)
# States of TensorStore in which the storage is at fault, and not what it holds.
_ELSEWHERE = (
    *("UNAVAILABLE", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAUTHENTICATED"),
    *("DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "UNKNOWN", "INTERNAL"),
)


def _is_elsewhere(said: str) -> bool:
    """Returns whether TensorStore speaks of the storage, or of an error of its system.

    A file that is missing is damage, though the system says so.
    """
    by_system = "OS error" in said and not said.startswith("NOT_FOUND")
    return said.startswith(_ELSEWHERE) or by_system


def _described(error: BaseException) -> str:
    """Returns an error in one line, behind the name of its leaf."""
    first = (str(error).strip() or repr(error)).splitlines()[0][:_LONG]
    text = f"{type(error).__name__}: {first}"
    leaf = re.search(r"""(?:reading|Metadata at) "(.+?)/(?:[\d.]+|\.zarray)\"""", first)
    if leaf is None:
        return text
    return f"{leaf[1].replace(_ESCAPED, chr(39))} cannot be read: {first}"


_ESCAPED = "\\'"  # how TensorStore writes a quotation mark
_LONG = 300  # characters of an error
