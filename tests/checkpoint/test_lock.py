"""Tests that a lock ends with the process that holds it, however that ends."""

import os
import signal
import subprocess
import sys

import pytest

from pipejax.checkpoint._lock import Lock

HOLDS = """
import sys, time
from pipejax.checkpoint._lock import Lock
lock = Lock(__import__("pathlib").Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def other(tmp_path):
    """Returns another process, which holds the lock of `tmp_path`."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_killed_process_leaves_no_lock(tmp_path, other):
    with pytest.raises(ValueError, match=f"by process {other.pid} on "):
        Lock(tmp_path)
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    Lock(tmp_path).release()


def test_released_lock_can_be_taken_again(tmp_path):
    first = Lock(tmp_path)
    with pytest.raises(ValueError, match="must not be in use"):
        Lock(tmp_path)
    first.release()
    first.release()
    Lock(tmp_path).release()


FORKS = """
import os, pathlib, sys
from pipejax.checkpoint._lock import Lock
folder = pathlib.Path(sys.argv[1])
lock = Lock(folder)
reading, writing = os.pipe()
lives, ready = os.pipe()
if os.fork() == 0:  # lives until the first pipe is closed
    os.close(writing)
    os.write(ready, b"x")
    os.read(reading, 1)
    os._exit(0)
os.read(lives, 1)
lock.release()
Lock(folder).release()
"""


def test_forked_child_holds_no_lock(tmp_path):
    """The fork is in another process, because JAX warns of forks."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(tmp_path)]
    subprocess.run(command, check=True)


def test_file_system_without_locks_is_logged_and_accepted(
    tmp_path, monkeypatch, caplog
):
    def without(file, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", without)
    Lock(tmp_path).release()
    assert "cannot be locked" in caplog.text


def test_lock_of_an_unknown_holder_is_refused(tmp_path):
    lock = Lock(tmp_path)
    (tmp_path / ".lock").write_text("?")
    with pytest.raises(ValueError, match="by a process that has not said its name"):
        Lock(tmp_path)
    lock.release()
