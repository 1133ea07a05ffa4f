"""Tests what a process without a key-value store keeps to itself."""

from pipejax.checkpoint._snapshots import _messages
from pipejax.checkpoint._snapshots._messages import Messages, Outcome, Point


def test_decisions_and_outcomes_come_back():
    messages = Messages("token", 0, 1)
    messages.decide(1, Point(True, 8))
    assert messages.decision(1) == Point(True, 8)
    messages.complete(1, "part-0-0")
    assert messages.completed(1, 0) == "part-0-0"
    messages.end(1, Outcome(0.5, 1.5, "full"))
    assert messages.outcomes(1) == [Outcome(0.5, 1.5, "full")]


def test_forgotten_messages_are_gone():
    messages = Messages("token", 0, 1)
    for number in (1, 2):
        messages.complete(number, "part-0-0")
        messages.end(number, Outcome(0.0, 0.0))
    messages.forget(1)
    assert sorted(messages.store._texts) == [
        "pipejax/snapshots/token/complete/2/0",
        "pipejax/snapshots/token/outcomes/2/0",
    ]


class Slow:
    """A store in which every answer takes two seconds of a clock."""

    def __init__(self):
        self.now, self.waits = 0.0, []

    def key_value_set(self, key, text):
        del key, text

    def blocking_key_value_get(self, key, milliseconds):
        del key
        self.now += 2.0
        self.waits.append(milliseconds / 1000)
        return ""


def test_leaving_processes_have_one_time_in_all(monkeypatch):
    store = Slow()
    monkeypatch.setattr(_messages.time, "monotonic", lambda: store.now)
    assert Messages("token", 0, 4, store).all_leave(5.0)
    assert store.waits == [5.0, 3.0, 1.0, 0.1]
