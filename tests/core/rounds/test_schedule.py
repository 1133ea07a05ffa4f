"""Tests which steps of a round have a chunk beside them."""

import pytest

from pipejax._core.rounds import Schedule


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
    schedule = Schedule(every, overlap)
    assert [schedule.chunk_at(taken) for taken in range(5)] == wanted
    assert schedule.chunks == max(1, overlap)
