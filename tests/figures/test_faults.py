"""Tests what the documents say about a storm of faults."""

from experiments.report import result

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


@quoted_in("CHANGELOG.md")
def test_useful_share_of_the_storm_is_quoted():
    share = 100 * JOB["goodput"]
    yield f"{RATE:.0f} faults an hour spends {share:.0f} % of its time on useful steps"


@quoted_in("docs/benchmarks/faults.md")
def test_healthy_jobs_are_described():
    record = result("faults_healthy")
    found = record["found"]
    assert (record["cpu"]["cores"], record["load"]) == (2, 2)
    yield f"{record['steps']} short steps on two cores, while two other programs kept"
    yield f"It ended {found['ended']} of {found['jobs']} jobs"
