"""Tests that the document on many hosts shows the results of jobs with faults."""

import pytest

from experiments.faults import __main__ as faults
from experiments.faults import endurance, goodput, start

from .results import assert_shown, lines, result


def rows_of_starts():
    record = result("faults_start")
    return lines(start.rows(record["found"], record["hosts"]))


def rows_of_faults():
    return lines(faults.rows(result("faults")["outcomes"]))


def rows_of_endurance():
    return lines(endurance.rows(result("faults_endurance")["diaries"]))


def rows_of_goodput():
    return lines(goodput.rows(result("faults_goodput")["cells"]))


def words_on_goodput():
    """Yields the shares of useful time, which all variants have in common."""
    cells = result("faults_goodput")["cells"]
    assert all(job["same_bits"] for cell in cells for job in cell["jobs"])
    sums = [goodput.sums(cell) for cell in cells]
    (useful,) = {round(100 * x["useful"] / sum(x.values())) for x in sums}
    (without,) = {round(100 * cell["without_faults"]["goodput"]) for cell in cells}
    yield f"It is {useful} % of all time"
    yield f"without faults it is {without} %"


def words_on_damage():
    """Yields the number of damaged checkpoints, none of which is restored wrongly."""
    outcomes = result("faults_checkpoints")["outcomes"]
    assert {each["outcome"] for each in outcomes} == {"exact", "fell back"}
    yield f"Of {len(outcomes)}\ncheckpoints that were damaged at random, none"


def words_on_checksums():
    """Yields the size of the larger state, and the shares of its checksums."""
    cell = result("checkpoint_cost")["cells"][-1]
    save, restore = (100 * cell[name][1] for name in ("of_save", "of_restore"))
    yield f"a state of {cell['bytes'] / 1e6:.0f} MB take {save:.0f} % of a save"
    yield f"a save and {restore:.0f} % of a restore"


def words_on_strangers():
    """Yields the number of strangers, and what they cost at most."""
    record = result("faults_strangers")
    costs = [cost for name, cost in record["costs"].items() if name != "none"]
    assert len(costs) == 10
    assert all(cost["met"] for cost in costs)
    assert max(cost["delay"] for cost in costs) <= 0.1
    assert max(cost["memory"] for cost in costs) <= 1
    yield f"among {record['strangers']} strangers of each of ten kinds"


@pytest.mark.parametrize(
    ("path", "rows"),
    [
        ("docs/many_hosts.md", rows_of_starts),
        ("docs/many_hosts.md", rows_of_faults),
        ("docs/many_hosts.md", rows_of_endurance),
        ("docs/many_hosts.md", rows_of_goodput),
        ("docs/many_hosts.md", words_on_goodput),
        ("docs/getting_started.md", words_on_damage),
        ("docs/getting_started.md", words_on_checksums),
        ("docs/many_hosts.md", words_on_strangers),
    ],
)
def test_figures_equal_the_result_files(path, rows):
    assert_shown(path, rows())
