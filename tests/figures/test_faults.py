"""Tests what the documents say about a storm of faults."""

from experiments.report import result
from pipejax._internal import fault_rate
from pipejax.checkpoint._snapshots import _pace

from .quoted import quoted_in

CELL = result("faults_storm")["cells"][0]
(JOB,) = CELL["jobs"]
COUNT, RATE = len(JOB["faults"]), 3600 * len(JOB["faults"]) / JOB["seconds"]


@quoted_in("docs/benchmarks/faults.md")
def test_storm_is_described():
    assert JOB["same_bits"]
    minutes, without = JOB["seconds"] / 60, 100 * CELL["without_faults"]["goodput"]
    yield f"had {COUNT} faults in {minutes:.0f} minutes, {RATE:.0f} an hour"
    yield f"a job without faults, which spent {without:.0f} % of its time on useful"


@quoted_in("docs/faults.md")
def test_time_between_snapshots_at_one_fault_a_day_is_quoted():
    cell = result("snapshot_cost")["cells"][-1]
    assert round(24 * fault_rate.SELDOM) == 1
    costs = cell["stop"], cell["beside"]
    seconds = _pace.steps_between(*costs, 1.0, fault_rate.SELDOM)  # steps of a second
    size = cell["bytes"] / 1e9
    yield f"one a day at first: for {size:.1f} GB, every {seconds / 60:.0f} minutes"


@quoted_in("CHANGELOG.md")
def test_useful_share_of_the_storm_is_quoted():
    share = 100 * JOB["goodput"]
    yield f"{RATE:.0f} faults an hour spends {share:.0f} % of its time on useful steps"


@quoted_in("docs/benchmarks/faults.md")
def test_healthy_jobs_are_described():
    record = result("faults_healthy")
    found = record["found"]
    assert (record["cpu"]["cores"], record["load"]) == (2, 4)
    yield f"{record['steps']} short steps on two cores, while four other programs kept"
    yield f"up to {found['most_load']:.0f} programs wanted a core at once"
    yield f"It ended {found['ended']} of {found['jobs']} jobs"
