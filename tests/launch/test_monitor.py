"""Tests the monitors of two processes, as threads of one process."""

import contextlib
import faulthandler
import re
import socket
import threading
import time

import jax
import pytest

from pipejax.launch import _diagnose, _liveness, _monitor, _where
from pipejax.launch._diagnose import ProcessReport
from pipejax.launch._kv_store import KeyValueStore

from .helpers import Store


@pytest.fixture
def lifeline(monkeypatch):
    """Returns a function that connects this process to one of a rank."""
    # These calls would end the tests.
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    for name, empty in (("_kept", {}), ("_said", {}), ("_closed", set())):
        monkeypatch.setattr(_liveness, name, empty)
    ends = socket.socketpair()

    def connected(rank):
        _liveness.keep({rank: ends[0]})
        return ends[1]

    yield connected
    for end in ends:
        end.close()


@pytest.fixture
def monitors(monkeypatch):
    """Starts two monitors in this process, and collects their diagnoses."""
    monkeypatch.setattr(_monitor, "PERIOD", 0.02)
    # This call would end the tests.
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    started, diagnoses = [], {}

    def start(limit=0.5):
        store = Store()
        for rank in range(2):
            progress = _monitor.Progress(since=time.monotonic())
            monitor = _monitor.Monitor(
                KeyValueStore(store), rank, 2, limit, progress, diagnoses.setdefault
            )
            monitor.start()
            started.append((monitor, progress))
        return store, started, diagnoses

    yield start
    for monitor, progress in started:
        progress.finished = True
        store_of(monitor).cut_off = False
    for monitor, _ in started:
        assert monitor.over.wait(10)


def store_of(monitor):
    return monitor.store.client


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_finished_processes_leave_together(monitors):
    _, ((first, here), (second, there)), diagnoses = monitors(limit=20.0)
    here.finished = True
    assert not first.over.wait(0.3)
    there.finished = True
    assert first.over.wait(10)
    assert second.over.wait(10)
    assert diagnoses == {}


def test_compilation_and_the_time_after_are_no_fault(monitors, monkeypatch):
    monkeypatch.setattr(_where, "thread", lambda _: _where.Where("compiling", True, ()))
    _, started, diagnoses = monitors()
    time.sleep(1.0)
    monkeypatch.setattr(_where, "thread", lambda _: _where.Where("", True, ()))
    time.sleep(0.1)
    assert diagnoses == {}
    assert all(not monitor.ending for monitor, _ in started)


def test_both_processes_reach_the_same_diagnosis(monitors):
    _, _, diagnoses = monitors()
    until(lambda: len(diagnoses) == 2)
    assert len(set(diagnoses.values())) == 1
    assert "has made no progress for" in diagnoses[0]


def test_missing_process_0_is_named(monkeypatch):
    monkeypatch.setattr(_monitor, "PERIOD", 0.02)
    monkeypatch.setattr(_monitor, "GRACE", 0.5)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    progress, diagnoses = _monitor.Progress(since=time.monotonic()), {}
    store = KeyValueStore(Store())
    monitor = _monitor.Monitor(store, 1, 2, 0.5, progress, diagnoses.setdefault)
    monitor.start()
    until(lambda: diagnoses)
    assert diagnoses[1] == "process 0 has not entered its `Watchdog`"
    progress.finished = True
    store.post(ProcessReport(0, "host0", finished=True, over=True))
    assert monitor.over.wait(10)


@pytest.mark.parametrize(("limit", "waits"), [(20.0, False), (0.5, True)])
def test_silent_process_is_waited_for_after_the_limit(
    lifeline, monkeypatch, limit, waits
):
    """After the limit, a process that cannot report may print its stacks."""
    monkeypatch.setattr(_monitor, "PERIOD", 0.02)
    progress, diagnoses = _monitor.Progress(since=time.monotonic()), {}
    store = KeyValueStore(Store())
    store.post(ProcessReport(1, "host1", pace=0.01))
    lifeline(1)
    monitor = _monitor.Monitor(store, 0, 2, limit, progress, diagnoses.setdefault)
    monitor.start()
    until(lambda: diagnoses)
    assert "process 1 on host1 has said nothing" in diagnoses[0]
    assert _liveness.all_closed() != waits
    monitor.over.set()


def test_process_cut_off_from_the_store_reports_the_cut(monitors):
    store, ((_, here), (_, there)), diagnoses = monitors()
    here.busy = there.busy = "an evaluation"
    store.cut_off = True
    until(lambda: 1 in diagnoses)
    assert "could not be reached from process 1 on" in diagnoses[1]


def test_failing_watchdog_reports_its_error(monitors):
    _, ((first, here), (second, _)), diagnoses = monitors(limit=20.0)
    here.step = object()  # `object()` cannot be encoded as JSON
    until(lambda: 0 in diagnoses)
    assert "the watchdog of process 0 on" in diagnoses[0]
    assert "has failed: TypeError" in diagnoses[0]
    # In a job, the diagnosis would have ended the process.
    for monitor in (first, second):
        monitor.over.set()


def test_failing_save_beside_the_main_thread_is_named(monitors, monkeypatch):
    """The thread acts like Orbax's: it waits for all others before it raises."""
    for module in (_monitor, _diagnose):
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
    _, started, diagnoses = monitors(limit=20.0)
    for _, progress in started:
        progress.busy = "a checkpoint"
    until(lambda: len(diagnoses) == 2)
    released.set()
    thread.join()
    assert re.fullmatch(
        r"process \d on \S+ failed at step 0: OSError: \[Errno 28\] No space left.*",
        diagnoses[0],
    )
    assert _where.failed_save() is None


def test_handled_exceptions_of_a_save_are_no_failure(monitors, monkeypatch):
    for module in (_monitor, _diagnose):
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
    _, started, diagnoses = monitors(limit=20.0)
    seen = []
    for _ in range(100):
        seen.append(_where.failed_save())
        time.sleep(0.01)
    released.set()
    thread.join()
    # Each error is current for a moment.
    assert any(isinstance(error, KeyError) for error in seen)
    assert diagnoses == {}
    assert all(not monitor.ending for monitor, _ in started)


def test_exception_is_described_without_its_notes():
    """JAX adds notes to exceptions that leave a jitted function, and they come last."""

    @jax.jit
    def fails(x):
        raise KeyError("label")

    with pytest.raises(KeyError) as caught:
        fails(1.0)
    caught.value.add_note("JAX has removed its internal frames")
    assert _monitor.described(caught.value) == "KeyError: 'label'"


def left(monitor, progress):
    """Lets a monitor of rank 1 see that all have finished."""
    progress.finished = True
    monitor.store.post(ProcessReport(0, "host0", finished=True, over=True))
    return monitor.over.wait(10)


def test_process_with_a_closed_connection_is_named_before_the_limit(
    lifeline, monkeypatch
):
    """Process 1 sends one report and no more, and then closes its connection."""
    monkeypatch.setattr(_monitor, "PERIOD", 0.02)
    monkeypatch.setattr(_diagnose, "CLOSED", 0.2)
    there = lifeline(1)
    store, diagnoses = KeyValueStore(Store()), {}
    progress = _monitor.Progress(since=time.monotonic())
    first = _monitor.Monitor(store, 0, 2, 60.0, progress, diagnoses.setdefault)
    first.start()
    store.post(ProcessReport(1, "host1", step=3))
    time.sleep(0.5)
    assert diagnoses == {}, "its connection is open"
    there.close()
    until(lambda: diagnoses)
    assert re.fullmatch(
        r"process 1 on host1 has said nothing for \d\.\d s, last at step 3: it died",
        diagnoses[0],
    )
    progress.finished = True
    store.post(ProcessReport(1, "host1", count=1, finished=True))
    assert first.over.wait(10)


def test_living_process_reports_its_closed_connection(lifeline):
    """A network device may close a connection that nobody uses."""
    there = lifeline(0)
    store, progress = KeyValueStore(Store()), _monitor.Progress()
    monitor = _monitor.Monitor(store, 1, 2, 60.0, progress, lambda *_: None)
    monitor.start()
    there.close()
    until(lambda: any(report.cut for report in store.reports(1)))
    assert left(monitor, progress)


def test_diagnosis_of_process_0_comes_over_the_connection(lifeline):
    there, diagnoses = lifeline(0), {}
    store, progress = KeyValueStore(Store()), _monitor.Progress(since=time.monotonic())
    monitor = _monitor.Monitor(store, 1, 2, 60.0, progress, diagnoses.setdefault)
    monitor.start()
    there.sendall(b"process 2 on host2 died\0")
    until(lambda: diagnoses)
    assert diagnoses == {1: "process 2 on host2 died"}
    assert left(monitor, progress)


def test_monitor_held_up_for_a_moment_counts_silence_anew(monkeypatch):
    """A process may be silent for two seconds, and this monitor for longer."""
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    clock, diagnoses = [100.0], {}
    monkeypatch.setattr(_monitor.time, "monotonic", lambda: clock[0])
    progress = _monitor.Progress(since=clock[0])
    store = KeyValueStore(Store())
    monitor = _monitor.Monitor(store, 0, 2, 60.0, progress, diagnoses.setdefault)
    monitor._heard.note([ProcessReport(1, "host1", step=30, pace=0.01)], 0.5)
    waits = iter([0.05] * 3 + [4.0] + [0.05] * 3)

    def wait(seconds):
        passed = next(waits, None)
        clock[0] += passed or 0.0
        return passed is None

    monkeypatch.setattr(monitor.over, "wait", wait)
    monitor._look()
    assert diagnoses == {}
    assert not monitor._found
