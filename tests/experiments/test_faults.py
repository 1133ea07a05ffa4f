"""Tests the experiment with faults: a real, small job, and how outcomes are read."""

import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import get_args

import jax
import numpy as np
import pytest
import tyro

from experiments import cluster
from experiments.faults import __main__ as faults
from experiments.faults import (
    checkpoints,
    endurance,
    goodput,
    healthy,
    program,
    provoke,
    start,
    storm,
    strangers,
)
from experiments.faults.command import returning
from pipejax._internal import timeline

from . import here
from .test_measurements import experiment

ROOT = pathlib.Path(__file__).parents[2]
WHY_NOT = cluster.reason_why_not()


@pytest.mark.full
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_jobs_with_faults_end_with_the_same_bits(tmp_path):
    """Provokes all faults but the slow link, and runs a job without a fault."""
    kinds = tuple(kind for kind in provoke._KINDS if kind != "slow")
    out = tmp_path / "faults.json"
    # With this seed, each fault that can happen to process 1 does, in step 6 or 7.
    size = {"runs": len(kinds), "hosts": 2, "steps": 9, "every": 3, "seed": 5389}
    outcomes = faults.main(faults.Config(**size, kinds=kinds, out=out))
    assert [outcome["fault"] for outcome in outcomes] == list(kinds)
    assert [outcome["rank"] for outcome in outcomes] == [1, 0, 1, 1, 1, 1]
    for outcome in outcomes:
        assert outcome["named"], outcome
        assert outcome["same_bits"], outcome
        assert outcome["again_after_s"] > 0, outcome
    assert json.loads(out.read_text())["outcomes"] == outcomes


def test_jobs_are_started_by_launch_and_judged_by_their_output(
    tmp_path, monkeypatch, capsys
):
    """Replaces the hosts by the output of those of a job with a killed process."""
    commands = []

    def printed(network, command):
        assert network.size == 2
        commands.append(command)
        if "--faults" not in command:
            return dict.fromkeys(range(2), "joined 1.0\ndigest 12ab\n")
        silent = "process 1 on host1 has said nothing for 12 s, last at step 4"
        job = f"joined 3.0\nprovoked 17.0\n{END}{silent}\njoined 30.5\ndigest 12ab\n"
        return dict.fromkeys(range(2), job)

    monkeypatch.setattr(faults, "printed", printed)
    monkeypatch.setattr(cluster, "reason_why_not", lambda: None)
    out = tmp_path / "faults.json"
    config = faults.Config(runs=1, hosts=2, seed=0, kinds=("killed",), out=out)
    (outcome,) = faults.main(config)
    _, command = commands
    begin = command.index("--") + 1
    assert command[1:4] == ["-m", "pipejax.cli", "launch"]
    assert command[begin + 1 : begin + 3] == ["-m", "experiments.faults.program"]
    ((kind, rank, step),) = faults.faults(config)
    assert command[-4:] == ["--faults", kind, str(rank), str(step)]
    assert outcome.items() >= {"named": True, "same_bits": True, "rank": 1}.items()
    assert outcome["again_after_s"] == 13.5
    assert json.loads(out.read_text())["outcomes"] == [outcome]
    assert "killed" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "number"), [("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)]
)
def test_fault_is_provoked_only_once(tmp_path, kind, number):
    once = "import sys; from experiments.faults import provoke; import pathlib"
    once += f"\nprovoke.once(({kind!r}, 0, 7), pathlib.Path(sys.argv[1]), '1gbit')"
    command = [sys.executable, "-c", once, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        stopped = os.WIFSTOPPED(status)
        assert (os.WSTOPSIG if stopped else os.WTERMSIG)(status) == number
        if stopped:
            process.kill()
        assert process.stdout.readline().startswith(b"provoked ")
    subprocess.run(command, cwd=ROOT, check=True)


def test_lost_host_returns_each_time(tmp_path):
    """A command that is killed runs again, and any other end is the end."""
    for name, last, status, runs in (
        ("whole", "exit 0", 0, 1),
        ("failed", "exit 3", 3, 1),
        ("killed", "[ $(wc -l < $0) = 3 ] || kill -9 $$", 0, 3),
    ):
        log = tmp_path / name
        command = returning(["sh", "-c", f"echo run >> $0; {last}", str(log)])
        assert subprocess.run(command, check=False).returncode == status
        assert log.read_text() == "run\n" * runs


def test_faults_of_every_kind_come_after_the_first_checkpoint():
    config = faults.Config()
    found = list(faults.faults(config))
    assert len(found) == 50
    assert {kind for kind, _, _ in found} == set(config.kinds)
    assert {rank for _, rank, _ in found} == set(range(4))
    assert all(5 <= step < 40 for _, _, step in found)
    assert {r for kind, r, _ in found if kind == "coordinator killed"} == {0}


SILENT = "process 2 on host2 has said nothing for 12 s, last at step 4"
GONE = "JAX has aborted it: process 0, at 10.77.0.1:29500, is gone. Look there."
CUT_OFF = (
    "process 0, which holds JAX's key-value store, could not be reached from process 1"
    " on host1 for 11 s"
)
FULL = "process 0 on host0 failed at step 19: OSError: [Errno 28] No space left"
END = "pipejax: this job is ended: "


@pytest.mark.parametrize(
    ("kind", "rank", "said", "named", "after"),
    [
        ("killed", 2, END + SILENT, True, 12),
        ("killed", 1, END + SILENT, False, None),  # another process is named
        ("killed", 0, GONE, True, None),
        ("coordinator killed", 0, GONE, True, None),
        # process 0 was not cut off
        ("coordinator killed", 0, END + CUT_OFF, False, None),
        ("stopped", 0, END + CUT_OFF, True, 11),
        ("stopped", 0, GONE, True, None),  # killed by its launcher
        ("cut off", 0, GONE, False, None),
        ("disk full", 1, END + FULL, True, None),
        ("slow", 1, "", True, None),
        ("slow", 1, END + SILENT, False, None),  # false alarm
    ],
)
def test_outcome_of_a_fault_is_read_from_the_output(
    monkeypatch, kind, rank, said, named, after
):
    job = f"joined 3.0\nprovoked 17.0\n{said}\njoined 30.5\ndigest 12ab\n"
    everyone = dict.fromkeys(range(4), job)
    monkeypatch.setattr(faults, "job", lambda *_: (everyone, 60.0))
    outcome = faults.run(faults.Config(), (kind, rank, 17), ["12ab"] * 4)
    assert (outcome["named"], outcome["said_after_s"]) == (named, after)
    assert outcome["same_bits"]
    titles, row = faults.rows([outcome])
    assert titles[0] == "fault"
    silent = f"{after} s" if after else ""
    assert row == [kind, "1", str(int(named)), silent, "14 s", "1"]


def test_other_bits_are_no_success(monkeypatch):
    ended = {0: "digest 12ab\n", 1: "digest 34cd\n"}
    monkeypatch.setattr(faults, "job", lambda *_: (ended, 60.0))
    config = faults.Config(hosts=2)
    outcome = faults.run(config, ("slow", 1, 9), ["12ab"] * 2)
    assert not outcome["same_bits"]
    assert outcome["again_after_s"] is None  # no process was ended


@pytest.mark.full
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.parametrize("timeout", [5.0, 10.0])
def test_bad_start_is_refused_at_once_by_all_hosts(tmp_path, timeout):
    """The quick run has a shorter timeout: every host waits for 1.5 timeouts."""
    out = tmp_path / "start.json"
    config = start.Config(
        faults=("none", "another configuration"), hosts=2, timeout=timeout, out=out
    )
    found = start.main(config)
    assert json.loads(out.read_text())["found"] == found
    assert [told["said"] for told in found["none"]] == ["", ""]
    _, begins, refused = start.rows(found, 2)
    assert begins == ["none", "0 of 2", "", "nothing: the job begins"]
    assert refused[:2] == ["another configuration", "2 of 2"]
    says = "config learning_rate must be the same in all processes; got '0.1' in"
    assert f"{says} process 0 on host0" in refused[3]
    assert all(told["seconds"] < config.timeout for told in found["none"])


def printed_here(network, command):
    """Returns the output of hosts that are devices of this process: all print it."""
    jax.config.update("jax_num_cpu_devices", network.size)
    assert command[1:3] == ["-m", "experiments.faults.program"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        program.main(tyro.cli(program.Config, args=command[3:]))
    return dict.fromkeys(range(network.size), out.getvalue())


@pytest.mark.parametrize(
    ("where", "steps"),
    [
        pytest.param("here", 20, marks=pytest.mark.full),
        pytest.param(
            "on hosts",
            40,
            marks=[
                pytest.mark.full,
                pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
            ],
        ),
    ],
)
def test_endurance_run_keeps_a_diary_for_every_host(
    tmp_path, monkeypatch, where, steps
):
    if where == "here":
        here.limit_devices(monkeypatch)
        monkeypatch.setattr(endurance, "printed", printed_here)
        monkeypatch.setattr(cluster, "reason_why_not", lambda: None)
    config = endurance.Config(
        steps=steps,
        every=steps // 2,
        diary=2,
        hosts=2,
        out=tmp_path / "out.json",
        plot=tmp_path / "out.png",
    )
    diaries = endurance.main(config)
    assert [entry["step"] for entry in diaries[1]] == list(range(2, steps + 1, 2))
    table = endurance.rows(diaries)
    assert [row[1] for row in table[1:]] == [f"{steps // 2} of {steps // 2} times"] * 2
    assert json.loads(config.out.read_text())["diaries"] == diaries
    assert config.plot.stat().st_size > 10_000


def test_drift_and_growth_are_shown_in_the_table():
    first = [
        {"step": step, "memory": 100.0, "threads": 9, "arrays": 30, "digest": "a"}
        for step in range(100, 1100, 100)
    ]
    second = [
        entry
        | {"memory": 100 + entry["step"] / 500, "threads": 9 + (entry["step"] > 700)}
        for entry in first
    ]
    second[-1] |= {"digest": "b"}
    _, *table = endurance.rows([first, second])
    assert abs(float(table[0].pop(5))) < 0.01
    assert table[0][1:] == ["10 of 10 times", *["100"] * 3, "9", "30"]
    memory = ["100", "101", "102", "+2.00"]
    assert table[1][1:] == ["9 of 10 times", *memory, "9-10", "30"]


@pytest.mark.full  # in the quick run, tests/checkpoint/test_damage.py
@pytest.mark.parametrize("trials", [50])
def test_damaged_checkpoints_are_never_restored_wrongly(tmp_path, trials):
    """Each is restored exactly, or from the newest whole step, which is said.

    The trials run in a process of their own: if a read fails, Orbax leaves others
    unfinished, whose ends would be blamed on other tests.
    """
    out = tmp_path / "checkpoints.json"
    flags = ("--trials", str(trials), "--seed", "7", "--out", str(out))
    assert "damaged checkpoints" in experiment("faults.checkpoints", *flags)
    outcomes = json.loads(out.read_text())["outcomes"]
    assert len(outcomes) == trials
    assert {each["outcome"] for each in outcomes} == {"exact", "fell back"}
    for each in outcomes:
        assert (each["outcome"] == "fell back") == ("step 6 in" in each["said"]), each


def test_wrong_restore_is_counted_and_fails_the_experiment(tmp_path, monkeypatch):
    """Without the checksums, a flipped bit is restored and the experiment fails."""
    monkeypatch.setattr("pipejax.checkpoint._read._check_sums", lambda *_: None)
    monkeypatch.setattr("pipejax.checkpoint._read.check_whole", lambda *_: None)
    kinds = {"item of the step before": checkpoints.KINDS["item of the step before"]}
    monkeypatch.setattr(checkpoints, "KINDS", kinds)
    out = tmp_path / "checkpoints.json"
    assert checkpoints.main(checkpoints.Config(trials=3, out=out)) == 1
    outcomes = json.loads(out.read_text())["outcomes"]
    assert "wrong" in {each["outcome"] for each in outcomes}


@pytest.mark.full
def test_strangers_end_no_roll_call(tmp_path, capsys):
    """Every job starts among 20 strangers of each kind, and process 0 stays small."""
    out = tmp_path / "strangers.json"
    strangers.main(strangers.Config(strangers=20, rounds=1, out=out))
    assert "delay, s" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert record["jobs"].keys() == {"none", *strangers.KINDS}
    for cost in record["costs"].values():
        assert cost["memory"] < strangers.MOST_MEMORY


def test_cost_of_strangers_is_their_delay_and_memory():
    without = [{"seconds": 1.0, "memory": 200.0}, {"seconds": 3.0, "memory": 200.0}]
    among = [{"seconds": 2.5, "memory": 210.0}, {"seconds": 2.5, "memory": 220.0}]
    wanted = {"delay": 0.5, "memory": 15.0, "met": True}
    assert strangers.cost(without, among) == wanted
    late = [each | {"seconds": 3.1} for each in among]
    assert not strangers.cost(without, late)["met"]


def timelines():
    """Returns two hosts: three steps and a save, a fault, and a second attempt.

    Before its fault at 12.5 s, the job has made steps 0 to 2 and a save after step 1.
    """
    first = [
        *(("begun", 1), ("joined", 3), ("built", 4), ("restored", 4)),
        *(("stepped", 9), ("stepped", 10), ("saved", 10.5), ("stepped", 11.5)),
    ]
    again = [
        *(("begun", 20), ("joined", 45), ("built", 46), ("restored", 48)),
        *(("stepped", 52), ("stepped", 55), ("ended", 57)),
    ]
    steps = iter([0, 1, 2, 2, 3])
    host = [
        {"at": at, "what": what, **({"step": next(steps)} if what == "stepped" else {})}
        for what, at in (*first, *again)
    ]
    # Host 1 provokes the fault, its link is back after 30 s, and it begins later.
    other = [{**event, "at": event["at"] + 0.5} for event in host]
    other[8:8] = [{"at": 12.5, "what": "provoked", "kind": "cut off"}]
    return host, other


def test_timeline_of_an_earlier_version_is_converted():
    """An earlier version notes the end of each step, and the end of each save."""
    hosts = [goodput.converted(host) for host in timelines()]
    begun, joined, restored, *steps, saved, _ = hosts[0][:8]
    assert [each["what"] for each in (begun, joined, restored, saved)] == [
        *("begun", "joined", "restored", "saved")
    ]
    assert [(each["at"], each["step"]) for each in steps] == [(4, 0), (9, 1), (10, 2)]
    assert (restored["seconds"], saved["seconds"]) == (0, 0.5)
    found = goodput.of_hosts(hosts, 0.0, 57.5)
    assert (found.step, found.steps) == (1, 4)
    assert sum(found.parts.values()) == pytest.approx(57.5)


def test_job_with_faults_is_continued_and_its_time_is_split(tmp_path, monkeypatch):
    """Runs the jobs without a cluster, with a stand-in for what the hosts do."""
    monkeypatch.setattr(cluster, "reason_why_not", lambda: None)
    clock = [1000.0]
    monkeypatch.setattr(timeline, "now", lambda: clock[0])

    def printed(network, command):
        option = "--timeline" if "--timeline" in command else None
        place = command.index(option) + 1 if option else 3
        for host, found in enumerate(timelines()):
            found = found if option else goodput.converted(found)
            begun = [{**each, "at": timeline.now() + each["at"]} for each in found]
            text = "".join(json.dumps(each) + "\n" for each in begun)
            (pathlib.Path(command[place]) / str(host)).write_text(text)
        clock[0] += 57.5
        return dict.fromkeys(range(2), "digest 12ab\n")

    monkeypatch.setattr(goodput, "printed", printed)
    size = {"hosts": 2, "seeds": (3,), "between": 10.0, "every": 5, "steps": 200}
    files = {"out": tmp_path / "found.json", "plot": tmp_path / "found.png"}
    config = goodput.Config(before=str(tmp_path), **size, **files)
    cells = goodput.main(config)
    assert [cell["variant"] for cell in cells] == ["with snapshots", "before"]
    for cell in cells:
        (job,) = cell["jobs"]
        assert job["same_bits"]
        assert job["parts_s"]["useful"] == pytest.approx(4, abs=0.1)
        assert job["faults"] == [list(fault) for fault in goodput.faults(config, 3)]
    assert json.loads(files["out"].read_text())["cells"] == cells
    assert files["plot"].stat().st_size > 10_000


@pytest.mark.full
def test_healthy_jobs_are_not_ended(tmp_path):
    out = tmp_path / "healthy.json"
    found = healthy.main(healthy.Config(jobs=2, steps=30, load=1, out=out))
    assert (found["jobs"], found["ended"]) == (2, 0)
    assert json.loads(out.read_text())["found"] == found


def test_faults_come_at_random_with_a_mean_distance():
    config = goodput.Config(steps=200_000)
    found = goodput.faults(config, 0)
    at = [step for _, _, step in found]
    assert np.mean(np.diff(at)) == pytest.approx(200, rel=0.1)
    assert {kind for kind, _, _ in found} == set(get_args(provoke.Kind))
    assert {rank for kind, rank, _ in found if kind == "coordinator killed"} == {0}
    assert found == goodput.faults(config, 0) != goodput.faults(config, 1)


def test_storm_has_many_faults_of_each_kind():
    (seed,) = storm.STORM.seeds
    found = goodput.faults(storm.STORM, seed)
    assert {kind for kind, *_ in found} == {"killed", "stopped", "host lost"}
    assert len(found) >= 50
