"""Tests that the document on many hosts shows the results of jobs with faults."""

import pytest

from experiments.faults import __main__ as faults
from experiments.faults import endurance, start

from .results import assert_shown, lines, result


def rows_of_starts():
    record = result("faults_start")
    return lines(start.rows(record["found"], record["hosts"]))


def rows_of_faults():
    return lines(faults.rows(result("faults")["outcomes"]))


def rows_of_endurance():
    return lines(endurance.rows(result("faults_endurance")["diaries"]))


def words_on_damage():
    """Yields the number of damaged checkpoints, none of which is restored wrongly."""
    outcomes = result("faults_checkpoints")["outcomes"]
    assert {each["outcome"] for each in outcomes} == {"exact", "fell back"}
    yield f"Of {len(outcomes)}\ncheckpoints that were damaged at random, none"


@pytest.mark.parametrize(
    ("path", "rows"),
    [
        ("docs/many_hosts.md", rows_of_starts),
        ("docs/many_hosts.md", rows_of_faults),
        ("docs/many_hosts.md", rows_of_endurance),
        ("docs/getting_started.md", words_on_damage),
    ],
)
def test_figures_are_those_of_the_result_files(path, rows):
    assert_shown(path, rows())
