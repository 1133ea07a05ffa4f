"""Tests that a process that stands by waits, is woken with its variables, and ends."""

import pytest

from .helpers import ended
from .test_guard import run

# The programs fork before they use JAX, so one version of Python is enough.
pytestmark = pytest.mark.one_python

PROGRAM = """
from pipejax.launch import _standby, _start

text = (
    "import os; from pipejax.launch import _standby; print('imported', flush=True);"
    " _standby.wait_if_standing_by();"
    " print(os.environ.get('JAX_PROCESS_ID'), os.environ['ROUND'], flush=True)"
)

def starts(number):
    variables = {**os.environ, "JAX_PROCESS_ID": "3", "ROUND": str(number)}
    return [_start.Start("3", [sys.executable, "-c", text], variables)]

reserve = _standby.Reserve(wanted=True)
"""


def said(program):
    code, out, errors = run(PROGRAM + program)
    assert code == 0, errors
    # Libraries may print warnings when they are imported.
    return [line for line in out.splitlines() if line[:1] in "-i0123456789"]


def test_waiting_process_is_woken_with_its_variables():
    assert said("""
reserve.fill(starts(1))
reserve.fill(starts(2))  # it is there
(process,) = reserve.take(starts(3))
print(process.stdout.read(), end="")
""") == ["imported", "3 3"]


def test_new_process_is_started_if_none_stands_by():
    assert said("""
(process,) = reserve.take(starts(1))
print(process.stdout.read(), end="")
""") == ["imported", "3 1"]


def test_process_stands_by_only_if_wanted():
    assert said("""
reserve.wanted = False
reserve.fill(starts(1))
(process,) = reserve.take(starts(2))
print(process.stdout.read(), end="")
""") == ["imported", "3 2"]


def test_new_process_is_started_if_the_other_has_died():
    assert said("""
reserve.fill(starts(1))
((process, _),) = reserve._standing
os.kill(process.pid, signal.SIGKILL)
process.wait()
(process,) = reserve.take(starts(2))
print(process.stdout.read(), end="")
""") == ["imported", "3 2"]


def test_unneeded_process_is_ended():
    assert said("""
reserve.fill(starts(1))
((process, _),) = reserve._standing
reserve.end()
print(process.returncode)
reserve.end()
""") == ["-9"]


def test_process_ends_with_its_launcher():
    """It ends although nothing has woken it."""
    (pid,) = said("""
child = os.fork()
if child == 0:
    process, _ = _standby._stands_by(starts(1)[0])
    process.stdout.readline()
    print(process.pid, flush=True)
    os._exit(0)
os.waitpid(child, 0)
""")
    assert ended(int(pid))
