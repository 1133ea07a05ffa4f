"""Tests that forked children keep no files open."""

import subprocess
import sys

FORKS = """
import os, select
from pipejax._internal.forks import closed_in_children
pipes = [os.pipe() for _ in range(4)]
(closed, _), (kept, _), (told, tell), (over, end) = pipes
first, second = (open(writing, "wb") for _, writing in pipes[:2])
closed_in_children(first)
if os.fork() == 0:  # lives until the last pipe is closed
    os.close(end)
    os.write(tell, b"x")
    os.read(over, 1)
    os._exit(0)
os.read(told, 1)
first.close()
second.close()
ended, _, _ = select.select([closed, kept], [], [], 0)
assert ended == [closed], ended
"""


def test_child_has_closed_connections_and_locks():
    """The fork is in another process, because JAX warns of forks."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], check=True)
