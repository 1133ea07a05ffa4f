"""Finds out where a thread of a process is, and whether a save has failed."""

import gc
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
# Files of JAX inside of which a process may be for any time, and what it does there.
_BUSY = {
    _JAX / "_src" / "interpreters" / "partial_eval.py": "tracing",
    _JAX / "_src" / "interpreters" / "mlir.py": "lowering",
    _JAX / "_src" / "compiler.py": "compiling",
}
_CHECKPOINT = _PIPEJAX / "checkpoint"
# Files in which pipejax itself reads or writes, and waits for no step of another.
_READS = {
    *(
        _CHECKPOINT / f"{name}.py"
        for name in ("_choose", "_deleted", "_lock", "_manager", "_meta")
    ),
    _CHECKPOINT / "_shared_folder.py",
    *(
        _CHECKPOINT / "_snapshots" / f"{name}.py"
        for name in ("_blocks", "_file", "_folder", "_peers")
    ),
}
_LIBRARY = pathlib.Path(sysconfig.get_path("stdlib"))
_DEEPEST = 12  # the number of innermost frames that are shown of a stack
_FINALIZES = "save_finalize"  # the name of the thread in which Orbax completes a save


class Where(NamedTuple):
    """The work of a thread, according to its stack."""

    busy: str  # "tracing", "lowering", "compiling", "a checkpoint", or an empty string
    waits: bool  # whether the thread is inside of a call into JAX or pipejax
    frames: Sequence[traceback.FrameSummary]

    @property
    def stack(self) -> str:
        return "".join(traceback.format_list(self.frames[-_DEEPEST:]))


def thread(identifier: int) -> Where:
    found = _frames(identifier)
    # Source lines are left out, since they would be read from files every second.
    stack = [traceback.FrameSummary(*each, lookup_line=False) for each in found]
    return of(stack[::-1])


def _frames(thread: int) -> list[tuple[str, int | None, str]]:
    """Returns file, line and name of a thread's frames, innermost first."""
    # A loop in Python would let the thread run between two frames. Python 3.11 may then
    # follow a link to a frame that no longer exists, and crash. Nothing here is
    # evaluated until `list` asks for the first element. From then on everything is one
    # call in C, during which no other thread runs.
    # A thread that has ended has no frames.
    frames_of = operator.methodcaller("get", thread)
    innermost = map(frames_of, iter(sys._current_frames, None))
    links = itertools.chain(itertools.islice(innermost, 1), itertools.repeat("f_back"))
    frames = itertools.takewhile(operator.truth, itertools.accumulate(links, getattr))
    place = operator.attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")
    # A collection of garbage, which any new object may start, would let threads run:
    # JAX does so in its own part of it.
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(map(place, frames))
    finally:
        if collects:
            gc.enable()


def of(stack: Sequence[traceback.FrameSummary]) -> Where:
    """Returns what a thread is doing, given its frames, outermost first."""
    files = [pathlib.Path(each.filename) for each in stack]
    busy = next((_BUSY[file] for file in reversed(files) if file in _BUSY), "")
    if not busy and _uses_files(files):
        busy = "a checkpoint"
    # A wait for a thread of JAX or pipejax ends in frames of Python's own library.
    called = [file for file in files if not _of_python(file)]
    libraries = {_JAX, _JAX.parent / "jaxlib", _PIPEJAX}
    waits = bool(called) and bool(libraries & set(called[-1].parents))
    return Where(busy, waits, stack)


def failed_save() -> BaseException | None:
    """Returns the exception of a save that fails in Orbax's thread, if any."""
    # Orbax waits for all other processes before it raises this exception, and they wait
    # for minutes for what this process was to write. So the exception is read from its
    # thread.
    raised = sys._current_exceptions()
    for thread in threading.enumerate():
        error: Any = raised.get(thread.ident or 0)
        if isinstance(error, tuple):  # Python 3.11 has the tuples of `sys.exc_info`
            error = error[1]
        if thread.name == _FINALIZES and error is not None:
            return error
    return None


def _uses_files(files: Sequence[pathlib.Path]) -> bool:
    """Returns whether a thread reads or writes files of a checkpoint or a snapshot.

    The innermost frame of pipejax counts, because such functions call others that wait
    for all processes, and are called by some.
    """
    own = [file for file in files if _CHECKPOINT in file.parents]
    by_orbax = any({"orbax", "checkpoint"} <= {*file.parts} for file in files)
    return by_orbax or (bool(own) and own[-1] in _READS)


def _of_python(file: pathlib.Path) -> bool:
    return _LIBRARY in file.parents and "site-packages" not in file.parts
