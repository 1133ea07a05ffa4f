"""Tests the race on text: when copies are taken, and what the table shows."""

import math

import numpy as np
import pytest

from experiments.cluster.member import Counters
from experiments.methods import NAMES, Method, TextProblem
from experiments.text_race import __main__ as race
from experiments.text_race import _member, _picture


class Counted(Method):
    """Counts steps, and has one in flight until it is finished."""

    def __init__(self):
        self.steps = 0
        self.in_flight = 0

    def step(self, batch):
        assert batch["tokens"].shape == (3, 9)
        self.steps, self.in_flight = self.steps + self.in_flight, 1

    def finish(self):
        self.steps, self.in_flight = self.steps + self.in_flight, 0

    def params(self):
        return np.array(self.steps)


@pytest.fixture
def alone(monkeypatch):
    """Makes this process the only host, and counts a megabyte at each look."""
    sent = iter(range(100))
    monkeypatch.setattr(_member.member, "barrier", lambda: None)
    monkeypatch.setattr(_member.member, "wire", lambda: Counters(next(sent) * 10**6, 0))


def test_copies_are_even_and_the_last_follows_the_drain(alone, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 30)
    problem = TextProblem(text, steps=10, context=8)
    found = _member.trained(Counted(), problem, 4)
    assert found["steps"] == [3, 5, 8, 10]
    assert [int(copy) for copy in found["copies"]] == [2, 4, 7, 10]
    assert found["megabytes"] == [1, 2, 3, 4]
    assert found["seconds"] == sorted(found["seconds"])


def cell(method, seed, loss, seconds):
    curve = {"loss": [3.0, loss], "seconds": [1, seconds], "megabytes": [1, 20]}
    return {"method": method, "seed": seed, "rate": "100mbit", "curve": curve}


def test_table_and_picture_have_the_quickest_way_first(tmp_path):
    cells = [cell("D-Sync", 0, 1.5, 90), cell("Pipe-SGD", 0, 1.6, 30)]
    cells += [cell("Pipe-SGD", 1, 1.62, 40)]
    titles, *rows = race.rows(cells)
    assert titles[4] == "seconds to 1.55"
    assert rows[0] == ["Pipe-SGD", "1.610 ± 0.010", "35", "20", "-", "2"]
    assert rows[1] == ["D-Sync", "1.500", "90", "20", "90", "1"]
    _picture.picture(cells, tmp_path / "race.png")
    assert (tmp_path / "race.png").stat().st_size > 10_000


def test_loss_is_reached_at_the_first_low_test():
    run = {"seconds": [1.0, 2.0, 3.0], "loss": [3.0, 2.0, 1.9]}
    times = [race.until(run, loss) for loss in (2.5, 2.0, 1.9, 1.8)]
    assert times == [2.0, 2.0, 3.0, math.inf]
    assert race.reached(times[:2]) == "2"
    assert race.reached(times) == "-"


def test_every_way_of_the_race_has_a_maker():
    assert set(race.Config().methods) == set(_picture.COLORS) <= set(NAMES)
