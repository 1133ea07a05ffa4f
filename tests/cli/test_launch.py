"""Tests `pipejax launch` as a user starts it, with programs that do not use JAX."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from pipejax import launch
from pipejax.cli import main

# The started programs do not use JAX, so one version of Python is enough. Each start
# takes a second.
WITHOUT_JAX = pytest.mark.one_python


@pytest.fixture
def write(tmp_path):
    """Writes a program, and returns the command that runs it."""

    def written(text):
        path = tmp_path / "program.py"
        path.write_text("import os, pathlib, signal, subprocess, sys, time\n")
        with path.open("a") as file:
            file.write(textwrap.dedent(text))
        return ["--", sys.executable, str(path)]

    return written


@pytest.fixture
def begin(tmp_path):
    """Starts `pipejax launch` in a temporary folder, and kills it after the test."""
    begun = []
    # SIGINT is ignored if the tests run in the background of a shell, and SIGHUP if
    # they run under nohup. Programs inherit ignored signals, but not handlers.
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: lambda *_: None,
    }
    before = {
        number: signal.signal(number, handler) for number, handler in handlers.items()
    }

    def started(*arguments, **environ):
        command = [sys.executable, "-m", "pipejax.cli", "launch", *arguments]
        begun.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env={**os.environ, "JAX_PLATFORMS": "cpu", **environ},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return begun[-1]

    yield started
    for number, handler in before.items():
        signal.signal(number, handler)
    for each in begun:
        each.kill()
        each.communicate()


def alive(pid):
    """Returns whether a process runs, and is not a zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def numbers(folder, count):
    """Waits until `count` programs have written their process ids; returns the ids."""
    until(lambda: len(list(folder.glob("pid*"))) == count)
    return [int(path.name[3:]) for path in folder.glob("pid*")]


FAMILY = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"])
    for pid in os.getpid(), child.pid:
        pathlib.Path(f"pid{pid}").touch()
    if "fails" in sys.argv and os.environ["JAX_PROCESS_ID"] == "1":
        time.sleep(1)
        sys.exit(3)
    child.wait()
"""


def test_processes_are_told_their_place_and_printed_behind_their_rank(
    begin, write, monkeypatch
):
    for name in ("NPROC", "GLIBC_TUNABLES"):  # variables that the user has set are kept
        monkeypatch.delenv(name, raising=False)
    program = write("""
        names = "COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"
        print(*(os.environ["JAX_" + name] for name in names))
        print(len(os.sched_getaffinity(0)), os.environ["NPROC"])
        print(os.environ["GLIBC_TUNABLES"])
    """)
    given = ("--processes", "2", "--hosts", "3", "--host", "1")
    started = begin(*given, "--coordinator", "node0:99", *program)
    out, errors = started.communicate(timeout=60)
    usable = len(os.sched_getaffinity(0))
    share = max(1, usable // 2)
    assert sorted(out.splitlines()) == sorted(
        f"[{rank}] {line}"
        for rank in (2, 3)
        for line in (
            f"node0:99 6 {rank}",
            f"{share} {max(2, share)}",
            "glibc.malloc.hugetlb=1",
        )
    )
    assert "pipejax:" not in errors


@pytest.mark.full
def test_all_processes_of_a_host_share_a_secret(begin, write, monkeypatch):
    """It is another one for each job, unless the user has set it for several hosts."""
    monkeypatch.delenv("PIPEJAX_SECRET", raising=False)
    program = write('print(os.environ.get("PIPEJAX_SECRET"))')
    here = ("--processes", "2")
    jobs = (
        (here, {}),
        (here, {}),
        (here, {"PIPEJAX_SECRET": "ours"}),
        ((*here, "--hosts", "2", "--coordinator", "node0:99"), {}),
    )
    found = []
    for given, environ in jobs:
        out, _ = begin(*given, *program, **environ).communicate(timeout=60)
        found.append({line.split()[1] for line in out.splitlines()})
    (first,), (second,), (ours,), (none,) = found
    assert len(first) == len(second) == 32
    assert first != second
    assert (ours, none) == ("ours", "None")


def test_first_failing_process_is_named_and_all_others_are_gone(begin, write, tmp_path):
    started = begin("--processes", "2", "--grace", "0.5", *write(FAMILY), "fails")
    _, errors = started.communicate(timeout=120)
    assert started.returncode == 3
    assert "pipejax: process 1 was the first to fail: exit status 3\n" in errors
    assert not any(map(alive, numbers(tmp_path, 4)))


@WITHOUT_JAX
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.full),
        pytest.param(signal.SIGHUP, marks=pytest.mark.full),
    ],
)
def test_every_signal_to_the_launcher_ends_all_processes(
    begin, write, tmp_path, number
):
    started = begin("--processes", "2", "--grace", "0.5", *write(FAMILY))
    pids = numbers(tmp_path, 4)
    assert all(map(alive, pids))
    started.send_signal(number)
    started.wait(timeout=60)
    until(lambda: not any(map(alive, pids)))
    if number != signal.SIGKILL:
        assert started.returncode == 128 + number


def test_programs_saving_on_sigterm_end_with_status_0(begin, write, tmp_path):
    program = write("""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved")))
        pathlib.Path(f"pid{os.getpid()}").touch()
        time.sleep(600)
    """)
    started = begin("--processes", "2", *program)
    numbers(tmp_path, 2)
    started.send_signal(signal.SIGTERM)
    out, _ = started.communicate(timeout=60)
    assert started.returncode == 0
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]


def test_launcher_goes_on_after_its_reader_has_gone(begin, write):
    started = begin("--processes", "1", *write("print('line\\n' * 100_000)"))
    started.stdout.readline()
    started.stdout.close()
    assert started.wait(timeout=60) == 0


@WITHOUT_JAX
def test_job_without_a_reader_is_started_again(begin, write):
    program = write("""
        path = pathlib.Path("failed")
        print("line\\n" * 100_000, flush=True)
        if not path.exists():
            path.touch()
            sys.exit(7)
    """)
    started = begin("--processes", "1", "--max-restarts", "1", *program)
    started.stdout.readline()
    started.stdout.close()
    assert started.wait(timeout=60) == 0
    assert "starting again, 1 of 1 times" in started.stderr.read()


@WITHOUT_JAX
def test_stopped_process_is_killed(begin, write):
    program = write("""
        if os.environ["JAX_PROCESS_ID"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    """)
    started = begin("--processes", "2", "--grace", "1", *program)
    _, errors = started.communicate(timeout=60)
    assert "process 1 was the first to fail: ended by SIGKILL" in errors
    assert started.returncode == 128 + signal.SIGKILL


@WITHOUT_JAX
def test_job_is_started_again_as_often_as_allowed(begin, write):
    program = write("""
        path = pathlib.Path("pid" + os.environ["JAX_PROCESS_ID"])
        before = len(path.read_text()) if path.exists() else 0
        path.write_text("x" * (before + 1))
        print("attempt", before)
        sys.exit(7 if before < 2 else 0)
    """)
    once = begin("--processes", "1", "--max-restarts", "1", *program)
    _, errors = once.communicate(timeout=120)
    assert once.returncode == 7
    assert errors.count("process 0 was the first to fail: exit status 7") == 2
    assert "starting again, 1 of 1 times" in errors
    again = begin("--processes", "1", "--max-restarts", "1", *program)
    assert again.communicate(timeout=120)[0] == "[0] attempt 2\n"
    assert again.returncode == 0


STEPS = """
    from pipejax._internal import timeline
    for number in range(4):
        timeline.note("step", step=number)
        time.sleep(0.2)
    pathlib.Path(f"stepped{os.environ['JAX_PROCESS_ID']}").touch()
    while not pathlib.Path("go on").exists():
        time.sleep(0.05)
"""


@WITHOUT_JAX
def test_goodput_is_shown_when_asked_and_at_the_end(begin, write, tmp_path):
    file = tmp_path / "goodput.json"
    started = begin("--processes", "2", "--goodput", str(file), *write(STEPS))
    until(lambda: len([*tmp_path.glob("stepped*")]) == 2)
    started.send_signal(signal.SIGUSR1)
    until(file.exists)
    (tmp_path / "go on").touch()
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 0
    assert errors.count(" % of ") == errors.count(", 3 steps of 0.2") == 2
    found = json.loads(file.read_text())
    assert (found["steps"], found["restarts"]) == (3, 0)
    assert 0 < found["goodput"] < 1


@WITHOUT_JAX
def test_job_without_steps_says_no_goodput(begin, write):
    _, errors = begin("--processes", "1", *write("pass")).communicate(timeout=60)
    assert "goodput" not in errors


@WITHOUT_JAX
def test_faults_per_hour_reach_the_program(begin, write):
    program = write("print(os.environ['PIPEJAX_FAULTS_PER_HOUR'])")
    given = ("--processes", "1", "--faults-per-hour", "2.5")
    assert begin(*given, *program).communicate(timeout=60)[0] == "[0] 2.5\n"


@WITHOUT_JAX
@pytest.mark.full
def test_restarted_job_takes_its_waiting_processes(begin, write, tmp_path):
    """The program notes when it was started, and where it is told its place."""
    program = write("""
        started = time.monotonic()
        from pipejax.launch import _standby
        stands_by = "PIPEJAX_STANDBY" in os.environ
        pathlib.Path(f"imported{os.getpid()}").touch()
        _standby.wait_if_standing_by()
        print("rank", os.environ["JAX_PROCESS_ID"], stands_by, flush=True)
        from pipejax._internal import timeline
        timeline.note("step", step=0)
        while not stands_by and len(list(pathlib.Path().glob("imported*"))) < 4:
            time.sleep(0.05)
        sys.exit(0 if stands_by else 7)
    """)
    given = ("--processes", "2", "--max-restarts", "1", "--standby")
    begun = begin(*given, *program)
    out, errors = begun.communicate(timeout=120)
    assert begun.returncode == 0, errors
    told = [line for line in sorted(out.splitlines()) if " rank " in line]
    assert told == [
        *("[0] rank 0 False", "[0] rank 0 True"),
        *("[1] rank 1 False", "[1] rank 1 True"),
    ]


@WITHOUT_JAX
def test_abort_by_jax_is_explained_by_the_loss_of_process_0(begin, write):
    given = ("--processes", "1", "--hosts", "2", "--host", "1")
    # Port 9 is "discard", at which no program listens.
    where = ("--coordinator", "127.0.0.1:9")
    here = begin("--processes", "1", *write("os.abort()"))
    assert "JAX has aborted it" not in here.communicate(timeout=60)[1]
    assert here.returncode == 128 + signal.SIGABRT
    started = begin(*given, *where, *write("os.abort()"))
    _, errors = started.communicate(timeout=60)
    assert "JAX has aborted it: process 0, at 127.0.0.1:9, is gone." in errors
    assert started.returncode == launch.FAULT


def test_single_process_is_watched_under_another_launcher(begin, write):
    program = write("print(os.environ['RANK'], os.environ.get('JAX_PROCESS_ID'))")
    variables = {"RANK": "3", "WORLD_SIZE": "4"}
    variables |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"}
    assert begin(*program, **variables).communicate(timeout=60)[0] == "[3] 3 None\n"


def test_several_processes_are_refused_under_another_launcher(monkeypatch, capsys):
    """Each task of the launcher would otherwise start a separate job."""
    variables = {"RANK": "3", "WORLD_SIZE": "4"}
    variables |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["launch", "--processes", "2", "--", "true"]) == 2
    assert "must be left out under torchrun, which has started 4" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "`--processes` must be given where there are no NVIDIA GPUs"),
        (["--processes", "0"], "`--processes` must be at least 1, got 0"),
        (["--processes", "1", "--grace", "nan"], "`--grace` must be at least 0, got n"),
        (["--processes", "1", "--grace", "inf"], "`--grace` must be at most 1,000,000"),
        (["--processes", "9" * 30], "`--processes` must be at most 4,096, got 999"),
        (["--processes", "1", "--host", "-1"], "`--host` must be at least 0, got -1"),
        (["--processes", "1", "--hosts", "2"], "`--coordinator` must be given with"),
        (["--processes", "1", "--host", "1"], r"`host` must lie in [0, 1)"),
        (["--processes", "1", "--", "nosuchprogram"], "there is no program 'nosuchp"),
        (["--processes", "1", "--faults-per-hour", "0"], "`--faults-per-hour` must be"),
        (["--processes", "1", "--goodput", "no/such"], "must be the name of a file in"),
        (["--processes", "1", "--max-restarts", "-1"], "`--max-restarts` must be at"),
        (["--processes", "1", "--coordinator", "node0"], "`coordinator` must be host:"),
    ],
)
def test_bad_arguments_of_launch_are_refused(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["launch", *arguments, "--", "true"]) == 2
    assert message in capsys.readouterr().err
