"""Rows of a plan: their numbers, which are printed, and which one is recommended."""

import re

import pytest

from pipejax.cli._rows import chosen, d_sync, exact, lines, number, said
from pipejax.cli._usage import UsageError
from pipejax.timing import Duration, RankedConfig, TrainConfig

NOTHING = Duration(0.0, 0.0, 0.0, 0.0, 0.0)
RANKED = [
    RankedConfig(way, NOTHING, step, 1.0, 4.0, 3.0)
    for way, step in [
        (TrainConfig(1, "psum", buckets=4), 1.0),
        (TrainConfig(2, "ring", "int8"), 1.5),
        (TrainConfig(2, "tree"), 2.0),
        (TrainConfig(2, "psum"), 2.5),
        # Of step times that are almost equal, the simpler way comes first.
        (TrainConfig(1, "psum"), 4.01),
        (TrainConfig(1, "ring"), 4.0),
    ]
]


def test_default_row_is_the_best_with_a_train_step():
    assert chosen(RANKED) is RANKED[1]
    assert chosen(RANKED, 4) is RANKED[3]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (0, "`--row` must be one of the rows 1 to 6, got 0. --top 6 prints all of"),
        (7, "`--row` must be one of the rows 1 to 6, got 7. --top 6 prints all of"),
        (
            1,
            "`--row` must be a way in one bucket, because pj.make_train_step has no"
            " buckets; got 1, width 1, psum, uncompressed, 4 buckets. Write this step",
        ),
    ],
)
def test_row_without_a_train_step_is_refused(row, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        chosen(RANKED, row)


def test_exact_and_d_sync_rows_are_found():
    assert exact(RANKED) is RANKED[2]
    assert d_sync(RANKED) is RANKED[5]
    assert number(RANKED, d_sync(RANKED)) == 6


def test_rows_are_numbered_and_extra_rows_are_added():
    printed = lines(RANKED, 2, (RANKED[1], RANKED[4]))
    assert printed == [f"  {row}  {said(RANKED[row - 1])}" for row in (1, 2, 5)]
    assert lines(RANKED, 99, ()) == lines(RANKED, 6, RANKED)
