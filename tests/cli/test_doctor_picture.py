"""Tests that the picture of the findings has the expected panels and bars."""

import pytest

from pipejax.cli import _doctor_picture
from pipejax.cli._diagnosis import Diagnosis

from .test_diagnosis import HERE, advice, overlap

pytest.importorskip("matplotlib")


def drawn(found, tmp_path, monkeypatch):
    """Returns the titles and labels of each panel of the saved figure."""
    kept = []
    new_figure = _doctor_picture.new_figure

    def keep(**settings):
        kept.append(new_figure(**settings))
        return kept[-1]

    monkeypatch.setattr(_doctor_picture, "new_figure", keep)
    _doctor_picture.picture(found, tmp_path / "found.svg")
    return {
        axes.get_title(): [label.get_text() for label in axes.get_yticklabels()]
        for axes in kept[0].axes
    }


def test_picture_without_advice_shows_measured_times_alone(tmp_path, monkeypatch):
    found = Diagnosis(HERE, {}, {}, overlap(2, 1, 2), None, [], None)
    assert drawn(found, tmp_path, monkeypatch) == {
        "measured: a model": ["compute", "communication", "step"]
    }


def test_picture_with_advice_shows_predicted_times_too(tmp_path, monkeypatch):
    found = Diagnosis(HERE, {}, {}, overlap(2, 1, 2), None, [], advice())
    _, predicted = drawn(found, tmp_path, monkeypatch).items()
    title, labels = predicted
    assert title == "predicted: 4,000,000 parameters"
    assert labels[0] == "compute"
    assert [label.split("\n")[0] for label in labels[1:]] == [
        "synchronous",
        "pipelined",
        "recommended",
    ]
