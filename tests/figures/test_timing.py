"""Tests what the document says about the phases of an all-reduce and predictions."""

import statistics

from experiments import prediction
from experiments.report import result

from .quoted import quoted_in

quoted = quoted_in("docs/benchmarks/predictions.md")


@quoted
def test_profile_figures_are_quoted():
    rows = {
        (cell["hosts"], name): row
        for cell in result("allreduce_profile")["cells"]
        for name, row in cell["rows"].items()
        if cell["devices"] == 1
    }
    server, psum = (
        rows[8, f"{name}, none"]["as_one_program"]
        for name in ("parameter_server", "psum")
    )
    yield f"with eight hosts it takes {server / psum:.1f} times as long"
    pairs = [rows[2, f"{name}, none"] for name in ("ring", "two_shot")]
    pairs += [rows[hosts, "halving_doubling, none"] for hosts in (2, 4, 8)]
    times = [row["as_one_program"] / row["wire"] for row in pairs]
    yield f"take {min(times):.1f} to {max(times):.1f} times the wire's"
    ring = rows[4, "ring, int8"]
    phases, whole = ring["phases"], ring["as_one_program"] / 100
    cores = sum(phases[name] for name in ("encode", "reduction", "decode")) / whole
    launch = phases["launch"] / whole
    yield f"take {cores:.0f} % of the time of the int8 ring, and launches take"
    yield f"ring, and launches take {launch:.0f} %"


@quoted
def test_large_prediction_errors_are_quoted():
    cells = result("prediction")["cells"]
    off = [
        (cell["hosts"], "sign" in title, statistics.median(row["measured"]))
        for cell in cells
        for title, row in cell["rows"].items()
        if abs(prediction.error(row)) > 0.25
    ]
    signs = [seconds for _, sign, seconds in off if sign]
    pairs = sum(hosts == 2 and not sign for hosts, sign, _ in off)
    count = sum(len(cell["rows"]) for cell in cells)
    yield f"{len(off)} of {count} predictions are off by more than 25 %"
    yield f"{pairs} of these"
    yield f"{len(signs)} are for `sign`"
    yield f"the other {len(off) - pairs - len(signs)},"
    assert max(signs) < 0.1
    yield "in less than 100 ms"


@quoted_in("docs/timing.md", "docs/benchmarks/predictions.md")
def test_prediction_errors_in_all_are_quoted():
    cells = result("prediction")["cells"]
    medians, worst = zip(
        *(
            prediction.errors([cell for cell in cells if cell["hosts"] == hosts])
            for hosts in (2, 4, 8)
        ),
        strict=True,
    )
    low, high, most = (100 * x for x in (min(medians), max(medians), max(worst)))
    yield f"off by {low:.0f} to {high:.0f} % in the median and {most:.0f} % at worst"
