"""Tests the timeline of a process."""

import json

from pipejax._internal import timeline


def test_events_are_appended_to_the_file_of_the_variable(tmp_path, monkeypatch):
    path = tmp_path / "0"
    monkeypatch.setenv(timeline.VARIABLE, str(path))
    before = timeline.now()
    timeline.note("step", step=3)
    timeline.note("saved", seconds=0.5)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [{k: v for k, v in line.items() if k != "at"} for line in lines] == [
        {"what": "step", "step": 3},
        {"what": "saved", "seconds": 0.5},
    ]
    assert before <= lines[0]["at"] <= lines[1]["at"] <= timeline.now()


def test_process_without_a_timeline_notes_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv(timeline.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    timeline.note("step", step=3)
    assert [*tmp_path.iterdir()] == []


def test_line_without_a_place_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv(timeline.VARIABLE, str(tmp_path / "gone" / "0"))
    timeline.note("step", step=3)
    assert [*tmp_path.iterdir()] == []
