"""Tests that the time of a job is split into parts that add up to it."""

import pytest

from pipejax.launch._goodput import PARTS, events, goodput


def event(what, at, **more):
    return {"at": at, "what": what, **more}


def steps(*times, first=0):
    return [event("step", at, step=number) for number, at in enumerate(times, first)]


def timelines():
    """Returns two hosts: three steps and a save, a fault, and a second attempt.

    The first attempt begins steps 0 to 3, and saves inside of step 1. The second has
    the state before step 2.
    """
    host = [
        *(event("begun", 1), event("joined", 3), event("restored", 4, seconds=1)),
        *(*steps(5, 9), event("saved", 9.5, seconds=0.5), *steps(10.5, 11.5, first=2)),
        *(event("begun", 20), event("joined", 45), event("restored", 48, seconds=2)),
        *steps(49, 52, 55, first=2),
    ]
    other = [{**each, "at": each["at"] + 0.5} for each in host]
    return host, other


def test_job_with_a_fault_has_all_parts():
    found = goodput(timelines(), 0.0, 57.5, cut_off=[(12.5, 42.5)])
    assert found.step == 1
    assert found.steps == 4
    assert found.parts == pytest.approx(
        {
            "useful": 4,
            "first start": 5 + 3,
            "again": 1,
            "slow steps": 2,
            "saves": 0.5,
            "detection": 9,
            "outage": 42.5 - 20.5,
            "start": 3,
            "build": 1.5,
            "restore": 2,
            "compilation": 2,
            "end": 2.5,
        }
    )
    assert sum(found.parts.values()) == pytest.approx(57.5)
    assert found.share == pytest.approx(4 / 57.5)


def test_goodput_is_said_in_one_line():
    said = str(goodput(timelines(), 0.0, 57.5, cut_off=[(12.5, 42.5)]))
    assert said.startswith(
        "goodput 7.0 % of 58 s, 4 steps of 1 s; outage 38.3 %, detection 15.7 %, fi"
    )
    assert "\n" not in said


def test_job_without_steps_has_no_goodput():
    assert goodput([[]], 0.0, 1.0) is None
    assert goodput([[event("begun", 1.0), *steps(2.0)]], 0.0, 3.0) is None


def test_job_without_faults_is_useful_but_for_its_start_and_end():
    found = goodput([[event("begun", 0.0), *steps(*range(2, 102))]], 0.0, 103.0)
    rest = {name for name in PARTS if found.parts[name] > 0} - {"useful"}
    assert rest == {"first start", "end"}
    assert found.parts["useful"] == pytest.approx(99)


def test_notes_with_several_steps_between_count_all():
    some = [event("step", at, step=10 * at) for at in range(5)]
    found = goodput([[event("begun", 0.0), *some]], 0.0, 5.0)
    assert (found.step, found.steps) == (0.1, 40)


def test_line_under_way_is_left_out(tmp_path):
    path = tmp_path / "0"
    assert events(path) == []
    path.write_text('{"at": 1, "what": "begun"}\n{"at": 2, "wh')
    assert events(path) == [event("begun", 1)]


def test_line_cut_off_by_a_full_disk_is_left_out(tmp_path):
    path = tmp_path / "0"
    lines = ['{"at": 1, "what": "begun"}', '{"at": 2, "wh{"at": 3, "what": "joined"}']
    path.write_text("\n".join([*lines, '{"at": 4, "what": "joined"}', ""]))
    assert events(path) == [event("begun", 1), event("joined", 4)]


def test_step_noted_twice_counts_once():
    """A second watchdog notes the step at which the first has ended."""
    twice = [*steps(1, 2, 3), *steps(4, 5, first=2)]
    found = goodput([[event("begun", 0.0), *twice]], 0.0, 5.0)
    assert (found.step, found.steps) == (1, 3)
    assert found.parts["slow steps"] == 1


def test_steps_beginning_anew_in_each_epoch_have_no_goodput():
    epochs = [*steps(1, 2, 3), *steps(4, 5, 6)]
    assert goodput([[event("begun", 0.0), *epochs]], 0.0, 7.0) is None


def test_steps_quicker_than_usual_count_in_full():
    """A warm-up of 60 steps of 1 s, and then 40 of 0.1 s."""
    times = [float(t) for t in range(61)] + [60 + 0.1 * t for t in range(1, 41)]
    found = goodput([[event("begun", 0.0), *steps(*times)]], 0.0, times[-1])
    assert found.step == 1
    assert found.share == pytest.approx(1.0)
    assert all(seconds >= 0 for seconds in found.parts.values())
    assert sum(found.parts.values()) == pytest.approx(64)
