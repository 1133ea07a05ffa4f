"""
Tests `guarded` between two instructions, where signals can get lost.

A signal arrives while C code runs, and Python calls its handler only after that.
`at_once` makes several calls without giving handlers a chance to run between them.
"""

import subprocess
import sys
import textwrap

import pytest

from ..command import WITHOUT_JAX

# The programs fork before they use JAX, so one version of Python is enough.
pytestmark = pytest.mark.one_python

BEGIN = """
import _thread, functools, operator, os, signal, sys, time
from pipejax.launch import _guard, _start, _supervise

signal.signal(signal.SIGINT, signal.default_int_handler)
waitpid = os.waitpid

def supervise(starts, *args):
    processes = map(_start.started, starts)
    return _supervise.supervise(starts, processes, *args, lambda: None)

def at_once(*calls):
    return [*map(operator.call, calls)]

def arrives(number):
    return functools.partial(_thread.interrupt_main, number)

def until(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()
"""


def run(program, packages=WITHOUT_JAX):
    """Returns the exit status and output of a program in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", packages + BEGIN + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_signal_at_the_start_of_the_wait_is_passed_on():
    code, _, errors = run("""
        def wait(*arguments):
            os.waitpid = waitpid
            wait = functools.partial(waitpid, *arguments)
            return at_once(arrives(signal.SIGTERM), wait)[1]

        os.waitpid = wait
        sys.exit(_guard.guarded(lambda received: 5 if until(lambda: received) else 1))
    """)
    assert code == 5, errors


def test_signal_is_not_sent_to_a_finished_child():
    code, out, errors = run("""
        def wait(*arguments):
            wait = functools.partial(waitpid, *arguments)
            ended = at_once(wait, arrives(signal.SIGTERM))[0]
            if ended[0]:
                os.kill = lambda *given: print("sent", given)
            return ended

        def work(received):
            os.waitpid = waitpid
            return 5

        os.waitpid = wait
        code = _guard.guarded(work)
        print("over")
        sys.exit(code)
    """)
    assert (code, out) == (5, "over\n"), errors


def test_signal_before_the_fork_is_known_to_the_child():
    code, _, errors = run("""
        fork = os.fork
        os.fork = lambda: [os.kill(os.getpid(), signal.SIGINT), fork()][1]
        sys.exit(_guard.guarded(lambda received: received[0]))
    """)
    assert code == 2, errors


def test_parent_gone_before_the_request_is_noticed():
    """The grandchild outlives its parent, calls `die_with_parent`, and is killed."""
    code, out, errors = run("""
        if os.fork() == 0:
            parent = os.getpid()
            if os.fork() == 0:
                assert until(lambda: os.getppid() != parent)
                print("orphan", flush=True)
                _guard.die_with_parent(parent, signal.SIGKILL)
                print("survives", flush=True)
            os._exit(0)
        os.wait()
    """)
    # The pipe has ended, so all processes that could write to it have ended.
    assert (code, out) == (0, "orphan\n"), errors


def test_exit_status_is_known_although_sigchld_is_ignored():
    code, _, errors = run("""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        sys.exit(_guard.guarded(lambda received: 5))
    """)
    assert code == 5, errors


def test_signal_between_two_attempts_ends_the_job():
    """No process is started again, and the exit status is that of the signal."""
    program = """
        from pipejax.cli import _launch, main

        say = _launch._say

        def said(what):
            say(what)
            if "starting again" in what:
                os.kill(os.getpid(), signal.SIGINT)

        _launch._say = said
        program = [sys.executable, "-c", "print('begins'); raise SystemExit(7)"]
        given = ["--processes", "1", "--max-restarts", "1", "--", *program]
        sys.exit(main(["launch", *given]))
    """
    code, out, errors = run(program, packages="")
    assert (code, out) == (128 + 2, "[0] begins\n"), errors
