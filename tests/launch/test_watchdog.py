"""Jobs with a fault: who names it, how they end, and when nobody is to blame."""

import contextlib
import faulthandler
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import launch
from pipejax.launch import _judge, _patrol, _where
from pipejax.launch._board import Board
from pipejax.launch._judge import Beat

from .helpers import free_port

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def run():
    """Runs a job of three with a fault; what each printed, and its exit status."""
    running = []

    def run_all(fault, faulty=1):
        port = free_port()
        for rank in range(3):
            command = [sys.executable, "-m", "tests.launch.watched", str(rank), "3"]
            running.append(
                subprocess.Popen(
                    [*command, str(port), str(faulty), fault],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        others = [each for rank, each in enumerate(running) if rank != faulty]
        for each in others:
            each.wait(timeout=240)
        running[faulty].send_signal(signal.SIGCONT)
        if fault == "stopped":
            running[faulty].kill()
        return [(each.communicate()[0], each.returncode) for each in running]

    yield run_all
    for each in running:
        each.kill()
        each.wait()
        each.stdout.close()


def test_one_that_is_killed_is_named_by_all_others(run):
    ended = run("killed")
    assert ended[1][1] == -signal.SIGKILL
    for said, status in (ended[0], ended[2]):
        assert status == launch.FAULT
        assert re.search(r"ended: process 1 on \S+ has said nothing for \d+ s", said)


def test_one_that_is_lost_is_named_with_where_it_is(run):
    for said, status in run("lost"):
        assert status == launch.FAULT
        assert re.search(r"has made no progress for 1\d s, at step 5", said)
        assert re.search(r'watched.py", line \d+, in lost\n', said)


def test_one_that_holds_the_interpreter_shows_where_it_is(run):
    ended = run("holds the interpreter")
    for said, status in (ended[0], ended[2]):
        assert status == launch.FAULT
        assert re.search(r"ended: process 1 on \S+ has said nothing for \d+ s", said)
    said, status = ended[1]
    assert status == 1  # faulthandler's
    assert re.search(r'watched.py", line \d+ in provoke\n', said)


def test_one_that_raises_ends_all_others(run):
    for said, status in run("raises"):
        assert status == launch.FAULT
        assert re.search(r"1 on \S+ failed at step 5: KeyError: 'label'", said)


def test_where_process_0_stands_still_all_others_say_so(run):
    for said, status in run("stopped", faulty=0)[1:]:
        assert status == launch.FAULT
        assert "process 0, which holds JAX's key-value store, could not be reac" in said


def test_a_pause_longer_than_the_limit_is_no_fault(run):
    assert [said.splitlines()[-1] for said, _ in run("slow")] == ["done"] * 3


def test_one_process_alone_is_not_watched():
    threads = threading.active_count()
    with launch.Watchdog(limit=10.0) as watchdog:
        watchdog.step(0)
        assert threading.active_count() == threads


@pytest.mark.parametrize("limit", [9.9, -1.0, float("nan"), 80.1])
def test_a_limit_too_short_to_hear_anyone_or_longer_than_jax_waits(limit):
    with pytest.raises(ValueError, match=r"`limit` must lie in \[10, 80\] seconds"):
        launch.Watchdog(limit)


def test_a_longer_heartbeat_allows_a_longer_limit(monkeypatch):
    given = {}
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *_, **options: given.update(options)
    )
    launch.initialize(f"127.0.0.1:{free_port()}", 1, 0, heartbeat=600.0)
    assert given["heartbeat_timeout_seconds"] == 600
    launch.Watchdog(580.0, heartbeat=600.0)
    with pytest.raises(ValueError, match=r"`limit` must lie in \[10, 580\] seconds"):
        launch.Watchdog(581.0, heartbeat=600.0)
    for heartbeat in (25.0, float("inf"), float("nan")):
        for use in (launch.initialize, launch.Watchdog):
            with pytest.raises(ValueError, match=r"`heartbeat` must lie in \[30, 1e"):
                use(heartbeat=heartbeat)


class Store:
    """A key-value store without a runtime; it may be cut off."""

    def __init__(self):
        self.texts = {}
        self.cut_off = False

    def key_value_set(self, name, text, allow_overwrite):
        assert allow_overwrite
        if self.cut_off:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")
        self.texts[name] = text

    def key_value_dir_get(self, folder):
        return [item for item in self.texts.items() if item[0].startswith(folder)]


@pytest.fixture
def patrols(monkeypatch):
    """Two of them in one process, and what they would have ended it with."""
    monkeypatch.setattr(_patrol, "PERIOD", 0.02)
    # It would end the tests.
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    started, verdicts = [], {}

    def start(limit=0.5):
        store = Store()
        for rank in range(2):
            progress = _patrol.Progress(since=time.monotonic())
            patrol = _patrol.Patrol(
                Board(store), rank, 2, limit, progress, verdicts.setdefault
            )
            patrol.start()
            started.append((patrol, progress))
        return store, started, verdicts

    yield start
    for patrol, progress in started:
        progress.finished = True
        store_of(patrol).cut_off = False
    for patrol, _ in started:
        assert patrol.over.wait(10)


def store_of(patrol):
    return patrol._board.client


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_all_that_leave_in_good_order_leave_together(patrols):
    _, ((first, here), (second, there)), verdicts = patrols(limit=20.0)
    here.finished = True
    assert not first.over.wait(0.3)
    there.finished = True
    assert first.over.wait(10)
    assert second.over.wait(10)
    assert verdicts == {}


def test_a_compilation_is_no_fault_nor_the_time_right_after_it(patrols, monkeypatch):
    monkeypatch.setattr(
        _where, "main_thread", lambda: _where.Where("compiling", True, ())
    )
    _, started, verdicts = patrols()
    time.sleep(1.0)
    monkeypatch.setattr(_where, "main_thread", lambda: _where.Where("", True, ()))
    time.sleep(0.2)
    assert verdicts == {}
    assert all(not patrol.ending for patrol, _ in started)


def test_both_say_the_same(patrols):
    _, _, verdicts = patrols()
    until(lambda: len(verdicts) == 2)
    assert len(set(verdicts.values())) == 1
    assert "has made no progress for" in verdicts[0]


def test_a_process_0_that_never_comes_is_named(monkeypatch):
    monkeypatch.setattr(_patrol, "PERIOD", 0.02)
    monkeypatch.setattr(_patrol, "GRACE", 0.5)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    progress, verdicts = _patrol.Progress(since=time.monotonic()), {}
    board = Board(Store())
    patrol = _patrol.Patrol(board, 1, 2, 0.5, progress, verdicts.setdefault)
    patrol.start()
    until(lambda: verdicts)
    assert verdicts[1] == "process 0 has not come as far as its watchdog"
    progress.finished = True
    board.post(Beat(0, "host0", finished=True, over=True))
    assert patrol.over.wait(10)


def test_one_that_is_cut_off_says_so(patrols):
    store, ((_, here), (_, there)), verdicts = patrols()
    here.busy = there.busy = "an evaluation"
    store.cut_off = True
    until(lambda: 1 in verdicts)
    assert "could not be reached from process 1 on" in verdicts[1]


def test_a_watchdog_that_fails_says_so(patrols):
    _, ((first, here), (second, _)), verdicts = patrols(limit=20.0)
    here.step = object()  # which is no JSON
    until(lambda: 0 in verdicts)
    assert "the watchdog of process 0 on" in verdicts[0]
    assert "has failed: TypeError" in verdicts[0]
    for patrol in (first, second):  # it would have ended the process
        patrol.over.set()


@pytest.mark.parametrize("number", [3, np.int64(3), jnp.int32(3)])
def test_a_step_is_a_whole_number_of_any_type(number):
    with launch.Watchdog() as watchdog:
        watchdog.step(number)
        assert type(watchdog._progress.step) is int
        with pytest.raises(TypeError):
            watchdog.step(0.5)


def test_a_second_watchdog_does_not_hear_the_first():
    store = Store()
    boards = [[Board.opened(store, rank) for rank in range(2)] for _ in range(2)]
    for board in boards[0]:
        board.post(Beat(0, "host0", finished=True))
        board.condemn(0, "it failed")
    assert [board.number for pair in boards for board in pair] == [0, 0, 1, 1]
    assert boards[1][0].beats() == []
    assert boards[1][1].verdict() == ""


def test_a_save_that_fails_beside_the_main_thread_is_named(patrols, monkeypatch):
    """As Orbax's thread does it: it waits for all others before it raises."""
    for module in (_patrol, _judge):
        monkeypatch.setattr(module, "GRACE", 0.1)
    released = threading.Event()

    def finalize():
        with contextlib.suppress(OSError):
            try:
                raise OSError(28, "No space left on device")
            finally:
                released.wait()

    thread = threading.Thread(target=finalize, name="save_finalize")
    thread.start()
    _, started, verdicts = patrols(limit=20.0)
    for _, progress in started:
        progress.busy = "a checkpoint"
    until(lambda: len(verdicts) == 2)
    released.set()
    thread.join()
    assert re.fullmatch(
        r"process \d on \S+ failed at step 0: OSError: \[Errno 28\] No space left.*",
        verdicts[0],
    )
    assert _where.failed_save() is None


def test_a_save_that_handles_its_exceptions_has_not_failed(patrols, monkeypatch):
    for module in (_patrol, _judge):
        monkeypatch.setattr(module, "GRACE", 0.2)
    released = threading.Event()

    def finalize():
        while not released.wait(0.01):
            try:
                raise KeyError("metadata")
            except KeyError:
                released.wait(0.02)

    thread = threading.Thread(target=finalize, name="save_finalize")
    thread.start()
    _, started, verdicts = patrols(limit=20.0)
    seen = []
    for _ in range(100):
        seen.append(_where.failed_save())
        time.sleep(0.01)
    released.set()
    thread.join()
    assert any(isinstance(error, KeyError) for error in seen)  # for a moment
    assert verdicts == {}
    assert all(not patrol.ending for patrol, _ in started)


def test_an_exception_is_described_without_its_notes():
    """JAX adds some to what leaves a jitted function, and they come last."""

    @jax.jit
    def fails(x):
        raise KeyError("label")

    with pytest.raises(KeyError) as caught:
        fails(1.0)
    caught.value.add_note("JAX has removed its internal frames")
    assert _patrol.described(caught.value) == "KeyError: 'label'"
