"""Tests how supervised processes end, and that none is left behind."""

import signal

import pytest

from .test_guard import run

# The programs fork before they use JAX, so one version of Python is enough.
pytestmark = pytest.mark.one_python


def test_signals_are_sent_only_to_unfinished_processes():
    """The ids of the other processes may already belong to new processes."""
    code, out, errors = run("""
        killpg = os.killpg

        def send(group, number):
            os.waitid(os.P_PID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            killpg(group, number)

        os.killpg = send
        starts = [
            _start.Start(name, command.split(), os.environ)
            for name, command in (("0", "false"), ("1", "sleep 600"), ("2", "true"))
        ]
        ended = supervise(starts, 0.0, [])
        print(ended.first, ended.code)
    """)
    assert (code, out) == (0, "0 1\n"), errors


def test_lines_are_named_and_the_last_of_a_failure_kept():
    """A process has its own core and variables, and 20 lines of a failure are kept."""
    code, out, errors = run("""
        core = min(os.sched_getaffinity(0))
        show = "import os; print(os.environ['MARK'], *os.sched_getaffinity(0))"
        fail = "for i in range(30): print(i)\\nraise SystemExit(3)"
        def start(name, text, **changes):
            variables = {**os.environ, **changes}
            command = [sys.executable, "-c", text]
            return _start.Start(name, command, variables, {core})

        ended = supervise([start("a", show, MARK="x")], 10.0, [])
        assert ended == _supervise.Ended(None, 0, (), None), ended
        print(core)
        ended = supervise([start("b", fail)], 10.0, [])
        assert (ended.first, ended.code, ended.told) == (0, 3, None), ended
        assert ended.lines == tuple(f"{i}\\n" for i in range(10, 30)), ended
    """)
    assert code == 0, errors
    shown, core, *lines = out.splitlines()
    assert shown == f"[a] x {core}"
    assert lines == [f"[b] {i}" for i in range(30)]


def test_signal_is_passed_on_and_reported(tmp_path):
    """One process ends at SIGTERM, and the other one ignores it and is killed."""
    code, out, errors = run(f"""
        import pathlib, threading

        folder = pathlib.Path({str(tmp_path)!r})
        text = "import pathlib, signal, time; signal.signal(signal.SIGTERM, %s);"
        text += " pathlib.Path('%s').touch(); time.sleep(600)"

        def told(number, handler, grace):
            ready, received = folder / str(number), []
            command = [sys.executable, "-c", text % (handler, ready)]

            def tell():
                if until(ready.exists):
                    received.append(signal.SIGTERM)

            threading.Thread(target=tell).start()
            start = _start.Start("0", command, os.environ)
            ended = supervise([start], grace, received)
            print(ended.first, ended.code, ended.told)

        told(0, "lambda *_: exit(0)", 60.0)
        told(1, "signal.SIG_IGN", 0.2)
    """)
    assert (code, out) == (0, "None 0 15\nNone -9 15\n"), errors


def test_signal_after_a_failure_is_passed_on_at_once(tmp_path):
    """The other process would have a minute to end by itself."""
    (tmp_path / "fails.py").write_text(
        "import pathlib, sys, time\n"
        "while not pathlib.Path('ready').exists():\n"
        "    time.sleep(0.01)\n"
        "sys.exit(3)\n"
    )
    (tmp_path / "waits.py").write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(600)\n"
    )
    code, out, errors = run(f"""
        import pathlib, threading

        os.chdir({str(tmp_path)!r})
        received = []

        def tell():
            if until(pathlib.Path("ready").exists):
                time.sleep(1.0)
                received.append(signal.SIGTERM)

        threading.Thread(target=tell).start()
        starts = [
            _start.Start(name, [sys.executable, name], os.environ)
            for name in ("fails.py", "waits.py")
        ]
        begun = time.monotonic()
        ended = supervise(starts, 60.0, received)
        print(ended.first, ended.code, ended.told, time.monotonic() - begun < 30)
    """)
    assert (code, out) == (0, "0 3 15 True\n"), errors


def test_ctrl_c_dropped_by_python_is_sent_again():
    """Python drops exceptions of finalizers, and goes on."""
    code, out, errors = run("""
        dropping = (
            "import signal, time\\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\\n"
            "class Dropping:\\n"
            "    def __del__(self):\\n"
            "        print('begun', flush=True)\\n"
            "        time.sleep(600)\\n"
            "Dropping()\\n"
            "print('goes on', flush=True)\\n"
            "time.sleep(600)\\n"
        )
        received = []
        supervised = _supervise._first_failure

        def told(*args):
            time.sleep(2)
            received.append(signal.SIGINT)
            return supervised(*args)

        _supervise._first_failure = told
        start = _start.Start("0", [sys.executable, "-c", dropping], os.environ)
        ended = supervise([start], 60.0, received)
        print(ended.code, ended.told)
    """)
    assert code == 0, errors
    lines = out.splitlines()
    assert lines[-1] == f"{-signal.SIGINT} {signal.SIGINT}"
    assert lines.index("[0] begun") < lines.index("[0] goes on")
