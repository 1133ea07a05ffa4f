"""Where in its program a process is, and what it fails at beside its main thread."""

import itertools
import operator
import pathlib
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

_PIPEJAX = pathlib.Path(__file__).parents[1]
_JAX = pathlib.Path(jax.__file__).parent
# At these a process may be for any time.
_BUSY = {
    _JAX / "_src" / "interpreters" / "partial_eval.py": "tracing",
    _JAX / "_src" / "interpreters" / "mlir.py": "lowering",
    _JAX / "_src" / "compiler.py": "compiling",
}
_LIBRARY = pathlib.Path(sysconfig.get_path("stdlib"))
_DEEPEST = 12
"""Frames of a stack that are shown, the innermost."""
_FINALIZES = "save_finalize"
"""Name of the thread in which Orbax ends a save."""


class Where(NamedTuple):
    """A place in a program.

    Attributes:
      busy: what of `_BUSY` it is inside of; empty if none.
      waits: whether it has called into JAX or pipejax, and not come back.
      frames: outermost first.
    """

    busy: str
    waits: bool
    frames: Sequence[traceback.FrameSummary]

    @property
    def stack(self) -> str:
        """The innermost frames, as in a traceback, with their lines of code."""
        return "".join(traceback.format_list(self.frames[-_DEEPEST:]))


def main_thread() -> Where:
    """Where this process's main thread is now."""
    found = _frames(threading.main_thread().ident or 0)
    # Without their lines, which would be read from files every second.
    stack = [traceback.FrameSummary(*each, lookup_line=False) for each in found]
    return of(stack[::-1])


def _frames(thread: int) -> list[tuple[str, int | None, str]]:
    """File, line and name of a thread's frames, innermost first, as they are at once.

    A walk in Python lets the thread run on between two frames, and Python 3.11 may then
    follow a link to one that is gone, and crash. So none of this is begun before
    `list` asks, and then all of it is one call in C, in which no other thread runs.
    """
    innermost = map(operator.itemgetter(thread), iter(sys._current_frames, None))
    links = itertools.chain(itertools.islice(innermost, 1), itertools.repeat("f_back"))
    frames = itertools.takewhile(operator.truth, itertools.accumulate(links, getattr))
    place = operator.attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")
    return list(map(place, frames))


def of(stack: Sequence[traceback.FrameSummary]) -> Where:
    """What files it has gone through, outermost first."""
    files = [pathlib.Path(each.filename) for each in stack]
    busy = next((_BUSY[file] for file in reversed(files) if file in _BUSY), "")
    if not busy and any({"orbax", "checkpoint"} <= {*file.parts} for file in files):
        busy = "a checkpoint"
    # Who waits for a thread of JAX's or pipejax's is in Python's own library.
    called = [file for file in files if not _of_python(file)]
    libraries = {_JAX, _JAX.parent / "jaxlib", _PIPEJAX}
    waits = bool(called) and bool(libraries & set(called[-1].parents))
    return Where(busy, waits, stack)


def failed_save() -> BaseException | None:
    """What a checkpoint failed with that is written beside the main thread, if any.

    Before Orbax raises it, it waits for all other processes; these wait, minutes long,
    for what this one was to write.
    """
    raised = sys._current_exceptions()
    for thread in threading.enumerate():
        error: Any = raised.get(thread.ident or 0)
        if isinstance(error, tuple):  # in Python 3.11, of `sys.exc_info`
            error = error[1]
        if thread.name == _FINALIZES and error is not None:
            return error
    return None


def _of_python(file: pathlib.Path) -> bool:
    return _LIBRARY in file.parents and "site-packages" not in file.parts
