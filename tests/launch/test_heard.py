"""Tests what a process hears of others: ages, delays and closed connections."""

import pytest

from pipejax.launch import _heard
from pipejax.launch._diagnose import LEAST, ProcessReport, patience


@pytest.fixture
def clock(monkeypatch):
    """Returns a list whose only element is the time."""
    now = [100.0]
    monkeypatch.setattr(_heard.time, "monotonic", lambda: now[0])
    return now


def report(count, rank=1, pace=0.01, **changes):
    return ProcessReport(rank, "host1", count, pace=pace, **changes)


def hear(heard, clock, times, **changes):
    """Hears a report at each of some times, in seconds since the first."""
    begun = clock[0]
    for count, passed in enumerate(times):
        clock[0] = begun + passed
        heard.note([report(count, **changes)], 0.5)


def test_age_counts_from_the_first_sight_of_the_last_report(clock):
    heard = _heard.Heard()
    hear(heard, clock, [0.0, 0.5])
    clock[0] += 0.3
    heard.note([report(1)], 0.5)
    assert [each.age for each in heard.seen()] == [pytest.approx(0.3)]
    heard.forgive()
    assert [each.age for each in heard.seen()] == [0.0]


def test_longest_delay_lengthens_the_patience(clock):
    heard = _heard.Heard()
    hear(heard, clock, [0.0, 0.5, 1.8, 2.4])
    [seen] = heard.seen()
    assert seen.late == heard.late(1) == pytest.approx(0.8)
    assert patience(seen, 60.0) == pytest.approx(4.0)
    assert patience(seen, 3.0) == 3.0


def test_reports_in_time_leave_the_shortest_patience(clock):
    heard = _heard.Heard()
    hear(heard, clock, [0.0, 0.4, 0.9, 1.5])
    [seen] = heard.seen()
    assert seen.late == pytest.approx(0.1)
    assert patience(seen, 60.0) == LEAST
    assert heard.late(2) == 0.0


def test_delay_is_forgotten_after_forty_reports(clock):
    heard = _heard.Heard()
    hear(heard, clock, [0.0, 3.0, *(3.0 + 0.5 * n for n in range(1, 40))])
    assert heard.late(1) == pytest.approx(2.5)
    heard.note([report(100)], 0.5)
    assert heard.late(1) == 0.0


def test_forgiven_silence_is_no_delay(clock):
    """The reports of others have waited while this process was held up."""
    heard = _heard.Heard()
    hear(heard, clock, [0.0, 0.5])
    clock[0] += 6.0
    heard.forgive()
    heard.note([report(2)], 0.5)
    assert heard.late(1) == 0.0


@pytest.mark.parametrize("changes", [{"busy": "compiling"}, {"pace": 0.0}])
def test_delay_beside_other_work_does_not_count(clock, changes):
    heard = _heard.Heard()
    hear(heard, clock, [0.0, 9.0], **changes)
    assert heard.late(1) == 0.0


def test_seconds_since_a_connection_closed_are_counted(clock):
    heard = _heard.Heard()
    heard.note([report(0), report(0, rank=2, cut=True), report(0, rank=3)], 0.5)
    heard.close({1, 2})
    clock[0] += 2.0
    heard.close({1, 2})
    # Process 2 says that its connection has closed, so it lives.
    assert [each.closed for each in heard.seen()] == [2.0, 0.0, 0.0]
    # A connection that the network has lost is left out.
    heard.close(set())
    assert [each.closed for each in heard.seen()] == [0.0, 0.0, 0.0]
