"""Tests the board on which each process reads the last beats of the others."""

from pipejax.launch._board import Board
from pipejax.launch._diagnosis import Beat

from .helpers import Store


def test_new_beat_replaces_the_last_of_its_rank():
    store = Store()
    first, second = Board(store), Board(store)
    first.post(Beat(1, "host1", step=3))
    first.post(Beat(1, "host1", step=4))
    second.post(Beat(11, "host11", step=5))
    every = [Beat(1, "host1", step=4), Beat(11, "host11", step=5)]
    assert sorted(first.beats(), key=lambda beat: beat.rank) == every
    # The key of process 11 begins with that of process 1.
    assert second.beats(1) == every[:1]
    assert second.beats(2) == []


def test_diagnosis_is_read_by_all_and_is_no_beat():
    store = Store()
    assert Board(store).diagnosis() == ""
    Board(store).report_fault(1, "process 0 is silent")
    assert Board(store).diagnosis() == "process 0 is silent"
    assert Board(store).beats() == []


def test_second_watchdog_does_not_hear_the_first():
    store = Store()
    boards = [[Board.opened(store, rank) for rank in range(2)] for _ in range(2)]
    for board in boards[0]:
        board.post(Beat(0, "host0", finished=True))
        board.report_fault(0, "it failed")
    assert [board.number for pair in boards for board in pair] == [0, 0, 1, 1]
    assert boards[1][0].beats() == []
    assert boards[1][1].diagnosis() == ""
