"""Tests that a process that stands by waits, is woken with its variables, and ends."""

import pytest

from .helpers import ended
from .test_guard import run

# The programs fork before they use JAX, so one version of Python is enough.
pytestmark = pytest.mark.one_python

PROGRAM = """
import dataclasses
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


KILLED = """
reserve.fill(starts(1))
((process, _),) = reserve._standing
os.kill(process.pid, signal.SIGKILL)
process.wait()
"""


@pytest.mark.parametrize(
    "before",
    [
        "reserve.fill(starts(1)); reserve.fill(starts(2))",  # the first is there
        "",
        "reserve.wanted = False; reserve.fill(starts(1))",
        KILLED,
    ],
    ids=["stands by", "never filled", "not wanted", "has died"],
)
def test_process_is_told_its_place_whether_new_or_woken(before):
    take = (
        "\n(process,) = reserve.take(starts(3))\nprint(process.stdout.read(), end='')"
    )
    assert said(before + take) == ["imported", "3 3"]


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


def test_process_behind_another_program_is_woken():
    """A script that starts the program stays its parent."""
    assert said("""
def behind(number):
    (start,) = starts(number)
    script = ["sh", "-c", '"$@"; exit $?', "sh", *start.command]
    return [dataclasses.replace(start, command=script)]

reserve.fill(behind(1))
(process,) = reserve.take(behind(2))
print(process.stdout.read(), end='')
print(process.wait())
""") == ["imported", "3 2", "0"]


def test_job_goes_on_without_room_for_another_process():
    """A container may allow no further process."""
    assert said("""
def refused(start):
    raise BlockingIOError("no more processes")

_standby._stands_by = refused
reserve.fill(starts(1))
print(-reserve.wanted)
(process,) = reserve.take(starts(2))
print(process.stdout.read(), end='')
""") == ["0", "imported", "3 2"]
