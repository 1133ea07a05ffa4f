"""Tests that a process that was started does not outlive the one that started it."""

import pytest

from .helpers import ended
from .test_guard import run

# The programs fork before they use JAX, so one version of Python is enough.
pytestmark = pytest.mark.one_python


def test_started_process_dies_with_its_parent():
    """The child is the leader of a group of its own, and has its variables."""
    code, out, errors = run("""
        from pipejax.launch import _start

        child = os.fork()
        if child == 0:
            command = ["sh", "-c", "echo $MARK; exec sleep 600"]
            start = _start.Start("0", command, {**os.environ, "MARK": "x"})
            process = _start.started(start)
            assert process.stdout.readline() == "x\\n"
            assert os.getpgid(process.pid) == process.pid
            print(process.pid, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    """)
    assert code == 0, errors
    assert ended(int(out))
