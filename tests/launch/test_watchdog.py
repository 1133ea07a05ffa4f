"""Tests jobs with a fault: which process is named, and how the processes end."""

import pathlib
import re
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import launch

from .helpers import free_port

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def run():
    """Runs a job of three with a fault, and returns their output and exit statuses."""
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


def test_killed_process_is_named_by_all_others(run):
    ended = run("killed")
    assert ended[1][1] == -signal.SIGKILL
    for said, status in (ended[0], ended[2]):
        assert status == launch.FAULT
        # Its connection has closed, so nobody waits for the limit of 10 s.
        line = (
            r"ended: process 1 on \S+ has said nothing for [0-2]\.\d s, .*: it died\n"
        )
        assert re.search(line, said)


@pytest.mark.full
def test_stuck_process_is_named_with_its_place_in_the_code(run):
    for said, status in run("lost"):
        assert status == launch.FAULT
        assert re.search(r"has made no progress for 1\d s, at step 5", said)
        assert re.search(r'watched.py", line \d+, in lost\n', said)


@pytest.mark.full
def test_process_holding_the_interpreter_shows_its_place(run):
    ended = run("holds the interpreter")
    for said, status in (ended[0], ended[2]):
        assert status == launch.FAULT
        assert re.search(r"ended: process 1 on \S+ has said nothing for [\d.]+ s", said)
    said, status = ended[1]
    assert status == 1  # the exit status of faulthandler
    assert re.search(r'watched.py", line \d+ in provoke\n', said)


@pytest.mark.full
def test_raising_process_ends_all_others(run):
    for said, status in run("raises"):
        assert status == launch.FAULT
        assert re.search(r"1 on \S+ failed at step 5: KeyError: 'label'", said)


@pytest.mark.full
def test_stopped_process_0_is_reported_by_all_others(run):
    for said, status in run("stopped", faulty=0)[1:]:
        assert status == launch.FAULT
        assert "process 0, which holds JAX's key-value store, could not be reac" in said


@pytest.mark.full
def test_pause_longer_than_the_limit_is_no_fault(run):
    assert [said.splitlines()[-1] for said, _ in run("slow")] == ["done"] * 3


def test_single_process_is_not_watched():
    threads = threading.active_count()
    with launch.Watchdog(limit=10.0) as watchdog:
        watchdog.step(0)
        assert threading.active_count() == threads


def test_pause_without_a_name_is_refused():
    """An empty name would count as no pause."""
    said = pytest.raises(ValueError, match=r"`what` must name the work.* got ''")
    with launch.Watchdog() as watchdog, said, watchdog.pause(""):
        pass


@pytest.mark.parametrize("limit", [9.9, -1.0, float("nan"), 80.1])
def test_limit_out_of_range_is_refused(limit):
    with pytest.raises(ValueError, match=r"`limit` must lie in \[10, 80\] seconds"):
        launch.Watchdog(limit)


def test_longer_heartbeat_allows_a_longer_limit(monkeypatch):
    given = {}
    monkeypatch.setenv("NPROC", "64")  # enough threads, so that it stays
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


@pytest.mark.parametrize("number", [3, np.int64(3), jnp.int32(3)])
def test_step_may_be_a_whole_number_of_any_type(number):
    with launch.Watchdog() as watchdog:
        watchdog.step(number)
        assert type(watchdog._progress.step) is int
        with pytest.raises(TypeError):
            watchdog.step(0.5)
