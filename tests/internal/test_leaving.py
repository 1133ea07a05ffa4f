"""Tests that a program leaves in bounded time after Ctrl-C and other exceptions."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from pipejax._internal import leaving

# What a program waits for does not depend on JAX. Each start takes two seconds.
WITHOUT_JAX = pytest.mark.one_python

PROGRAM = """
import hashlib, signal, sys, threading, time
from pipejax._internal import leaving

leaving.LIMIT = leaving.STUCK = leaving.ERROR_LIMIT = 0.2
signal.signal(signal.SIGINT, signal.default_int_handler)
name = sys.argv[1]
if name == "own":
    signal.signal(signal.SIGINT, lambda *_: None)
leaving.hurry_after_interrupts()
leaving.hurry_after_errors()
if name == "later":
    signal.signal(signal.SIGINT, lambda *_: None)


def in_a_call(iterations):
    # The timer's thread runs inside of the call, which does not look at signals.
    threading.Timer(0.3, print, ["begun"], {"flush": True}).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", iterations)


class Dropping:
    def __del__(self):
        print("begun", flush=True)
        time.sleep(600)


if name == "dropped":
    dropping = Dropping()
    del dropping  # prints and drops what is raised meanwhile
    time.sleep(600)
elif name == "raised":
    threading.Thread(target=time.sleep, args=(600,)).start()
    print("begun", flush=True)
    time.sleep(600)
elif name == "failed":
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise RuntimeError("no such file")
elif name == "stuck":
    in_a_call(10**9)
else:
    in_a_call(3 * 10**6)
    print("ended", flush=True)
"""


def interrupted(name):
    """Runs the program, sends it Ctrl-C, and returns its output and exit status."""
    command = [sys.executable, "-c", PROGRAM, name]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as program:
        while program.stdout.readline() != "begun\n":  # after what JAX says
            assert program.poll() is None
        program.send_signal(signal.SIGINT)
        try:
            return program.communicate(timeout=60)[0], program.returncode
        finally:
            program.kill()


@WITHOUT_JAX
def test_interrupted_program_does_not_wait_for_threads():
    """Python would wait for the thread for ten minutes."""
    out, code = interrupted("raised")
    assert "KeyboardInterrupt" in out
    assert code == 130


@WITHOUT_JAX
def test_failed_program_does_not_wait_for_threads():
    command = [sys.executable, "-c", PROGRAM, "failed"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "RuntimeError: no such file" in ended.stderr
    assert ended.returncode == 1


@WITHOUT_JAX
def test_interrupt_dropped_by_python_is_raised_again():
    """It was raised in a callback, as in the one of JAX in a garbage collection."""
    out, code = interrupted("dropped")
    assert "in Dropping" not in out
    assert "KeyboardInterrupt" in out
    assert code == -signal.SIGINT


@WITHOUT_JAX
def test_process_stuck_in_a_call_leaves():
    """Python would raise the KeyboardInterrupt in some minutes."""
    out, code = interrupted("stuck")
    assert "still in the same call 0.2 s after Ctrl-C" in out
    assert code == 130


@WITHOUT_JAX
@pytest.mark.parametrize("name", ["own", pytest.param("later", marks=pytest.mark.full)])
def test_signal_handler_of_the_program_takes_precedence(name):
    out, code = interrupted(name)
    assert (out, code) == ("ended\n", 0)


def test_wait_for_work_is_bounded(caplog):
    gate = threading.Event()
    assert not leaving.within(0.05, gate.wait)
    gate.set()
    assert leaving.within(60, lambda: None)

    def fail():
        raise OSError("no route to host")

    assert leaving.within(60, fail)
    assert "while this process was leaving: no route to host" in caplog.text


@pytest.mark.parametrize("interactive", [False, True])
def test_timer_for_leaving_is_started_by_its_exceptions(monkeypatch, interactive):
    shown, timers = [], []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error))
    monkeypatch.setattr(threading.Timer, "start", lambda x: timers.append(x))
    if interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    leaving._hurry_at_the_end(KeyboardInterrupt, 4.0, 130)
    leaving.hurry_after_errors()
    for error in (ValueError("w"), KeyboardInterrupt()):
        sys.excepthook(type(error), error, None)
        assert shown[-1][1] is error
    assert all(timer.daemon for timer in timers)
    found = [(timer.interval, timer.args) for timer in timers]
    wanted = [(leaving.ERROR_LIMIT, (1,)), (4.0, (130,))]
    assert found == ([] if interactive else wanted)


@pytest.mark.parametrize(("last", "code"), [(None, 1), (KeyboardInterrupt(), 130)])
def test_exit_status_follows_the_last_exception(monkeypatch, last, code):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)  # for the bound
    monkeypatch.setattr(sys, "last_value", last, raising=False)
    leaving.prepared()()
    assert codes == [code]


def test_wait_for_other_processes_is_bounded(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(leaving, "_GOODBYE", 0.05)
    monkeypatch.setattr(leaving, "_say_goodbye", gate.wait)
    monkeypatch.setattr(os, "_exit", lambda code: gate.set())
    leaving.prepared()()
    assert gate.is_set()


CLOSED = """
import os, sys, threading
from pipejax._internal import leaving
print("is kept in a buffer")
os.close(1)
threading.Timer(0, leaving._exit, [7]).start()
threading.Event().wait(60)
"""


@WITHOUT_JAX
def test_process_exits_with_an_unread_output():
    ended = subprocess.run(
        [sys.executable, "-c", CLOSED], stdout=subprocess.PIPE, timeout=50
    )
    assert ended.returncode == 7
