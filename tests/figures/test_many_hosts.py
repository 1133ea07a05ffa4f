"""Tests the results of jobs with faults, and what the documents say about them."""

import statistics

from experiments.faults import goodput
from experiments.report import result

from .quoted import least_and_most, quoted_in


@quoted_in("docs/many_hosts.md")
def test_goodput_figures_are_quoted():
    """All variants have the same share of useful time."""
    cells = result("faults_goodput")["cells"]
    assert all(job["same_bits"] for cell in cells for job in cell["jobs"])
    sums = [goodput.sums(cell) for cell in cells]
    (useful,) = {round(100 * x["useful"] / sum(x.values())) for x in sums}
    (without,) = {round(100 * cell["without_faults"]["goodput"]) for cell in cells}
    yield f"It is {useful} % of all time"
    yield f"without faults it is {without} %"


@quoted_in("docs/getting_started.md")
def test_damaged_checkpoints_are_never_restored_wrongly():
    outcomes = result("faults_checkpoints")["outcomes"]
    assert {each["outcome"] for each in outcomes} == {"exact", "fell back"}
    yield f"Of {len(outcomes)} checkpoints that were damaged at random, none"


@quoted_in("docs/getting_started.md")
def test_checksum_costs_are_quoted():
    cell = result("checkpoint_cost")["cells"][-1]
    save, restore = (100 * cell[name][1] for name in ("of_save", "of_restore"))
    yield f"a state of {cell['bytes'] / 1e6:.0f} MB take {save:.0f} % of a save"
    yield f"a save and {restore:.0f} % of a restore"


@quoted_in("docs/many_hosts.md")
def test_answers_to_strangers_are_quoted():
    record = result("faults_strangers")
    costs = [cost for name, cost in record["costs"].items() if name != "none"]
    assert len(costs) == 10
    for cost in costs:
        assert cost["met"]
        assert cost["delay"] <= 0.1
        assert cost["memory"] <= 1
    yield f"among {record['strangers']} strangers of each of ten kinds"


@quoted_in("docs/many_hosts.md")
def test_two_steps_in_turn_overlap():
    ratios = [found["ratio"] for found in result("two_steps")["found"]]
    assert statistics.median(ratios) <= 1.1
    yield f"two steps in turn take {statistics.median(ratios):.2f} times the longer"
    yield f"{least_and_most(ratios)} times in five rounds"
