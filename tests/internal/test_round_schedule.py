"""Tests which steps of a round have a chunk beside them."""

import pytest

from pipejax._internal.round_schedule import RoundSchedule


@pytest.mark.parametrize(
    ("every", "overlap", "wanted"),
    [
        (4, 4, [0, 1, 2, 3, 0]),
        (4, 2, [None, 0, None, 1, None]),
        (5, 3, [None, 0, None, 1, 2]),
        (3, 1, [None, None, 0, None, None]),
        (2, 0, [None] * 5),
    ],
)
def test_chunks_are_spread_over_a_round(every, overlap, wanted):
    schedule = RoundSchedule(every, overlap)
    assert [schedule.chunk_at(taken) for taken in range(5)] == wanted
    assert schedule.chunks == max(1, overlap)


@pytest.mark.parametrize(
    ("every", "overlap", "message"),
    [
        (0, 0, "`sync_every` must be an integer of at least 1, got 0"),
        (True, 0, "`sync_every` must be an integer of at least 1, got True"),
        (2, -1, "`overlap_steps` must be an integer of at least 0, got -1"),
        (2, 0.5, "`overlap_steps` must be an integer of at least 0, got 0.5"),
        (2, 3, "`overlap_steps` must be at most `sync_every`: .* Got 3 and 2"),
    ],
)
def test_bad_lengths_are_refused(every, overlap, message):
    with pytest.raises(ValueError, match=message):
        RoundSchedule(every, overlap)
