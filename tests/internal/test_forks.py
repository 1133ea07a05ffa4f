"""Tests that forked children keep no files open."""

import fcntl
import subprocess
import sys

FORKS = """
import os, sys, time
from pipejax._internal.forks import closed_in_children
file = open(sys.argv[1], "w")
if sys.argv[2] == "closed":
    closed_in_children(file)
import fcntl
fcntl.flock(file, fcntl.LOCK_EX)
if os.fork() == 0:  # lives until the pipe is closed
    sys.stdin.read()
    os._exit(0)
print("forked", flush=True)
"""


def is_free(path):
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_child_holds_no_lock(tmp_path):
    """The fork is in another process, because JAX warns of forks."""
    for way in ("closed", "open"):
        path = tmp_path / way
        command = [sys.executable, "-c", FORKS, str(path), way]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as process:
            assert process.stdout.readline() == "forked\n"
            process.wait()
            assert is_free(path) == (way == "closed")
            process.stdin.close()
