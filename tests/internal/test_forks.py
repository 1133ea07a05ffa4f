"""Tests that forked children keep no files open."""

import fcntl
import subprocess
import sys

FORKS = """
import fcntl, os, sys
from pipejax._internal.forks import closed_in_children
closed, kept = files = [open(path, "w") for path in sys.argv[1:]]
closed_in_children(closed)
for file in files:
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
    closed, kept = tmp_path / "closed", tmp_path / "kept"
    command = [sys.executable, "-c", FORKS, str(closed), str(kept)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "forked\n"
        process.wait()
        assert is_free(closed)
        assert not is_free(kept)
        process.stdin.close()
