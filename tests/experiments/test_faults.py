"""The experiment with faults, small: a real job, and how outcomes are read."""

import json

import pytest

from experiments import cluster
from experiments.faults import __main__ as faults
from experiments.faults import endurance, start

WHY_NOT = cluster.reason_why_not()


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.parametrize(
    "kind", ["killed", "coordinator killed", "stopped", "cut off", "disk full"]
)
def test_a_job_with_a_fault_ends_with_the_same_bits(tmp_path, kind):
    out = tmp_path / "faults.json"
    config = faults.Config(runs=1, hosts=2, steps=9, every=3, kinds=(kind,), out=out)
    (outcome,) = faults.main(config)
    assert outcome["named"]
    assert outcome["same_bits"]
    assert outcome["again_after_s"] > 0
    assert json.loads(out.read_text())["outcomes"] == [outcome]


def test_faults_are_of_every_kind_and_after_the_first_checkpoint():
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
        ("killed", 1, END + SILENT, False, None),  # somebody else
        ("killed", 0, GONE, True, None),
        ("coordinator killed", 0, GONE, True, None),
        ("coordinator killed", 0, END + CUT_OFF, False, None),  # it was not cut off
        ("stopped", 0, END + CUT_OFF, True, 11),
        ("stopped", 0, GONE, True, None),  # by its launcher
        ("cut off", 0, GONE, False, None),
        ("disk full", 1, END + FULL, True, None),
        ("slow", 1, "", True, None),
        ("slow", 1, END + SILENT, False, None),  # a false alarm
    ],
)
def test_what_is_to_be_said(monkeypatch, kind, rank, said, named, after):
    job = f"begun 3.0\nprovoked 17.0\n{said}\nbegun 30.5\ndigest 12ab\n"
    everyone = dict.fromkeys(range(4), job)
    monkeypatch.setattr(faults, "job", lambda *_: (everyone, 60.0))
    outcome = faults.run(faults.Config(), kind, rank, 17, ["12ab"] * 4)
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
    outcome = faults.run(config, "slow", 1, 9, ["12ab"] * 2)
    assert not outcome["same_bits"]
    assert outcome["again_after_s"] is None  # nobody was ended


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_a_start_with_something_wrong_is_refused_by_all_and_at_once(tmp_path):
    out = tmp_path / "start.json"
    config = start.Config(
        faults=("none", "another configuration"), hosts=2, timeout=10.0, out=out
    )
    found = start.main(config)
    assert json.loads(out.read_text())["found"] == found
    assert [told["said"] for told in found["none"]] == ["", ""]
    _, begins, refused = start.rows(found, 2)
    assert begins == ["none", "0 of 2", "", "nothing: the job begins"]
    assert refused[:2] == ["another configuration", "2 of 2"]
    assert "config learning_rate differs: '0.1' in 0 on host0" in refused[3]
    assert all(told["seconds"] < config.timeout for told in found["none"])


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_a_diary_of_every_host(tmp_path):
    config = endurance.Config(
        steps=40,
        every=20,
        diary=2,
        hosts=2,
        out=tmp_path / "out.json",
        plot=tmp_path / "out.png",
    )
    diaries = endurance.main(config)
    assert [entry["step"] for entry in diaries[1]] == list(range(2, 41, 2))
    table = endurance.rows(diaries)
    assert [row[1] for row in table[1:]] == ["20 of 20 times"] * 2
    assert json.loads(config.out.read_text())["diaries"] == diaries
    assert config.plot.stat().st_size > 10_000


def test_drift_and_growth_are_seen():
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
