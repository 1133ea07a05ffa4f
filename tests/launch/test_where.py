"""Tests what one thread of a process sees of another."""

import concurrent.futures
import gc
import pathlib
import sys
import threading
import time
import traceback

import jax
import orbax.checkpoint as ocp
import pytest

from pipejax import checkpoint
from pipejax.launch import _where


def looked_at():
    """Returns where this thread is, as seen by another thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(_where.thread, threading.get_ident()).result()


def test_thread_beside_the_main_thread_is_seen():
    """A training loop need not run in the main thread, and a thread may have ended."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert "in looked_at" in pool.submit(looked_at).result().stack
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    assert _where.thread(ended.ident) == ("", False, [])


def test_user_code_neither_waits_nor_is_busy():
    where = looked_at()
    assert (where.busy, where.waits) == ("", False)
    assert "in test_user_code_neither_waits_nor_is_busy" in where.stack


def test_no_garbage_is_collected_among_the_frames(monkeypatch):
    """A collection may let the thread run on, whose frames would then be gone."""
    collects, frames = [], sys._current_frames

    def current_frames():
        collects.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", current_frames)
    looked_at()
    assert {*collects} == {False}
    assert gc.isenabled()


def test_compilation_counts_as_busy(monkeypatch):
    found = []

    def compiled(*_, **__):
        found.append(looked_at())
        raise KeyError

    monkeypatch.setattr(jax._src.compiler, "backend_compile_and_load", compiled)
    never_before = time.time_ns() % 2**20  # no cache has this program
    with pytest.raises(KeyError):
        jax.jit(lambda x: x + never_before)(1.0)
    assert found[0].busy == "compiling"


def test_call_into_jax_counts_as_waiting(monkeypatch):
    frame = traceback.FrameSummary(jax.monitoring.__file__, 1, "wait")
    mine = traceback.FrameSummary(__file__, 1, "train")
    assert _where.of([mine, frame]).waits
    thread = traceback.FrameSummary(threading.__file__, 1, "wait")
    assert _where.of([mine, frame, thread]).waits
    assert not _where.of([frame, mine, thread]).waits
    assert not _where.of([frame, mine]).waits


def test_checkpoint_is_busy_but_not_its_wait_for_arrays():
    orbax = pathlib.Path(ocp.__file__).parent / "checkpoint_manager.py"
    mine, ours, theirs, jaxs = (
        traceback.FrameSummary(str(file), 1, "save")
        for file in (__file__, checkpoint.__file__, orbax, jax.monitoring.__file__)
    )
    assert _where.of([mine, ours, theirs, jaxs]).busy == "a checkpoint"
    waits = _where.of([mine, ours, jaxs])
    assert (waits.busy, waits.waits) == ("", True)


def test_stack_is_read_in_one_call():
    """No thread runs while the stack is read, because Python 3.11 could crash.

    Meanwhile the reading thread calls no function in Python, not even the one that
    returns the frames: a single call does everything in C.
    """
    called, thread = [], threading.main_thread().ident

    def watch():
        sys.setprofile(
            lambda frame, event, of: called.append((event, frame.f_code.co_name, of))
        )
        try:
            return _where._frames(thread)
        finally:
            sys.setprofile(None)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        frames = pool.submit(watch).result()
    assert [name for event, name, _ in called if event == "call"] == ["_frames"]
    assert sys._current_frames not in [of for event, _, of in called]
    assert getattr not in [of for event, _, of in called]
    names = [name for _, _, name in frames]
    assert "test_stack_is_read_in_one_call" in names[:-1]
    assert names[-1] == traceback.extract_stack()[0].name


@pytest.mark.parametrize(
    "file", ["_shared_folder.py", "_snapshots/_file.py", "_snapshots/_peers.py"]
)
def test_reading_a_snapshot_counts_as_busy(file):
    """A wait for other processes counts as one, also inside of what reads."""
    folder = pathlib.Path(checkpoint.__file__).parent
    names = file, "_snapshots/_messages.py", "_fault.py"
    mine, reads, waits, agrees = (
        traceback.FrameSummary(str(path), 1, "read")
        for path in (__file__, *(folder / name for name in names))
    )
    assert all((folder / name).exists() for name in names)
    for stack, busy in (
        ([mine, reads], "a checkpoint"),
        ([mine, reads, agrees, reads], "a checkpoint"),
        ([mine, waits], ""),
        ([mine, reads, agrees], ""),
    ):
        assert _where.of(stack).busy == busy


def test_files_reading_snapshots_exist():
    assert all(path.exists() for path in _where._READS)
