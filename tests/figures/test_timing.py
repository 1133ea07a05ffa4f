"""Tests that the document shows the phases of an all-reduce, and predictions."""

import statistics

import pytest

from experiments import prediction

from .results import assert_shown, lines, result


def rows_of_allreduce_profile():
    """Yields the phases on four hosts, then programs over their wire time, by hosts."""
    cells = {
        (c["hosts"], c["devices"]): c for c in result("allreduce_profile")["cells"]
    }
    for place in ((4, 1), (4, 2)):
        for name, row in cells[place]["rows"].items():
            seconds = [*row["phases"].values(), row["as_one_program"], row["wire"]]
            numbers = (f"{1e3 * x:.0f}" for x in seconds)
            yield f"| {name}{' *' * (place == (4, 2))} | " + " | ".join(numbers) + " |"
    for name in cells[4, 1]["rows"]:
        found = [cells[hosts, 1]["rows"][name] for hosts in (2, 4, 8)]
        times = [(row["as_one_program"], row["wire"]) for row in found]
        numbers = (f"{1e3 * x:.0f} | {x / wire:.2f}" for x, wire in times)
        yield f"| {name} | " + " | ".join(numbers) + " |"


def words_on_the_profile():
    cells = {
        (c["hosts"], c["devices"]): c["rows"]
        for c in result("allreduce_profile")["cells"]
    }
    server, psum = (
        cells[8, 1][name]["as_one_program"]
        for name in ("parameter_server, none", "psum, none")
    )
    yield f"with eight hosts it takes {server / psum:.1f} times as long"
    pairs = [cells[2, 1][f"{name}, none"] for name in ("ring", "two_shot")]
    pairs += [cells[hosts, 1]["halving_doubling, none"] for hosts in (2, 4, 8)]
    times = [row["as_one_program"] / row["wire"] for row in pairs]
    yield f"take {min(times):.1f} to {max(times):.1f} times the wire's"
    ring = cells[4, 1]["ring, int8"]
    phases = ring["phases"]
    cores = sum(phases[name] for name in ("encode", "reduction", "decode"))
    shares = (x / ring["as_one_program"] for x in (cores, phases["launch"]))
    yield "take {:.0%} of the time of the int8 ring, and launches take {:.0%}".format(
        *shares
    ).replace("%", " %")


def rows_of_prediction():
    cells = result("prediction")["cells"]
    yield from lines(prediction.rows(cells)[1:])
    off = [
        (cell["hosts"], "sign" in title)
        for cell in cells
        for title, row in cell["rows"].items()
        if abs(prediction.error(row)) > 0.25
    ]
    pairs = off.count((2, False))
    signs = sum(sign for _, sign in off)
    count = sum(len(cell["rows"]) for cell in cells)
    yield f"{len(off)} of {count} predictions are off by more than 25 %"
    yield f"{pairs} of these"
    yield f"{signs} are for `sign`"
    yield f"the other {len(off) - pairs - signs},"


def words_on_the_prediction():
    cells = result("prediction")["cells"]
    by_hosts = [
        prediction.errors([cell for cell in cells if cell["hosts"] == hosts])
        for hosts in (2, 4, 8)
    ]
    medians, worst = zip(*by_hosts, strict=True)
    yield "off by {:.0f} to {:.0f} % in the median and {:.0f} % at worst".format(
        *(100 * error for error in (min(medians), max(medians), max(worst)))
    )
    short = max(
        statistics.median(row["measured"])
        for cell in cells
        for title, row in cell["rows"].items()
        if "sign" in title and abs(prediction.error(row)) > 0.25
    )
    assert short < 0.1
    yield "in less than 100 ms"


@pytest.mark.parametrize(
    ("path", "rows"),
    [
        ("docs/timing.md", rows_of_allreduce_profile),
        ("docs/timing.md", words_on_the_profile),
        ("docs/timing.md", rows_of_prediction),
        ("docs/timing.md", words_on_the_prediction),
    ],
)
def test_figures_equal_the_result_files(path, rows):
    assert_shown(path, rows())
