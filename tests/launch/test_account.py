"""Tests that a launcher keeps the timelines of its processes over all attempts."""

import json
import pathlib

import pytest

from pipejax._internal import fault_rate, timeline
from pipejax.launch._account import account
from pipejax.launch._start import Start


def note_steps(start, *numbers):
    for number in numbers:
        path = start.environment[timeline.VARIABLE]
        timeline.append(path, "step", step=number)


def test_goodput_of_all_attempts_is_said_and_written(tmp_path):
    said, file = [], tmp_path / "goodput.json"
    with account(None, file, said.append) as kept:
        for numbers in ((0, 1, 2), (1, 2, 3)):
            (start,) = kept.begun([Start("0", ["true"], {})])
            note_steps(start, *numbers)
        kept.show()
        assert len(said) == 1
        folder = pathlib.Path(start.environment[timeline.VARIABLE]).parent
        assert folder.exists()
    assert not folder.exists()
    assert [text.split(" % of ")[0].split()[0] for text in said] == ["goodput"] * 2
    found = json.loads(file.read_text())
    assert (found["steps"], found["restarts"]) == (3, 1)
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])


def test_missing_goodput_of_a_job_without_steps_is_said(tmp_path):
    file = tmp_path / "goodput.json"
    for wanted in (None, file):
        said = []
        with account(None, wanted, said.append) as kept:
            kept.begun([Start("0", ["true"], {})])
        assert len(said) == (wanted is not None)
    assert said[0].startswith(f"{file} is not written: goodput needs two steps that ")
    assert not file.exists()


def test_faults_of_a_job_change_the_expected_rate():
    rates = []
    with account(None, None, print) as kept:
        for _ in range(3):
            (start,) = kept.begun([Start("0", ["true"], {})])
            rates.append(float(start.environment[fault_rate.VARIABLE]))
    assert rates == pytest.approx([1 / 24, 1 + 1 / 24, 2 + 1 / 24], rel=1e-3)


def test_job_settles_some_seconds_after_its_first_step(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(timeline, "now", lambda: clock[0])
    with account(None, None, print) as kept:
        for late in (False, True):
            (start,) = kept.begun([Start("0", ["true"], {})])
            clock[0] += 30.0
            assert not kept.settled()
            if late:  # without a step
                clock[0] += 31.0
            else:
                note_steps(start, 0)
                clock[0] += 2.0
                assert not kept.settled()
                clock[0] += 6.0
            assert kept.settled()


def test_given_rate_and_variables_stay():
    with account(2.5, None, print) as kept:
        (start,) = kept.begun([Start("0", ["true"], {"A": "a"})])
        assert start.environment["A"] == "a"
        assert start.environment[fault_rate.VARIABLE] == "2.5"
        variables = {fault_rate.VARIABLE: "7"}
        (start,) = kept.begun([Start("0", ["true"], variables)])
        assert start.environment[fault_rate.VARIABLE] == "7"


def test_timeline_without_a_place_ends_no_job(tmp_path):
    """The disk may be full, and the folder of a goodput gone."""
    said, file = [], tmp_path / "gone" / "goodput.json"
    with account(None, file, said.append) as kept:
        start = Start("0", ["true"], {timeline.VARIABLE: str(tmp_path / "gone" / "0")})
        (start,) = kept.begun([start])
        note_steps(start, 0, 1, 2)
        assert not kept.settled()
        kept.begun([Start("0", ["true"], {timeline.VARIABLE: str(tmp_path / "0")})])
        note_steps(Start("0", [], {timeline.VARIABLE: str(tmp_path / "0")}), 0, 1, 2)
    assert said[0].startswith("goodput ")
    assert said[1].startswith(f"{file} is not written: [Errno 2]")
