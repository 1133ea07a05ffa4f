"""Tests that the page on the paper shows the times of its benchmarks."""

import pytest

from experiments import paper, scaling

from .results import assert_shown, lines, result


def cells():
    return result("paper")["cells"]


def titles(cell):
    problem, megabytes = cell["problem"], 4 * cell["elements"] / 1e6
    return f"{problem['model']}, {megabytes:.1f} MB, {cell['rate']}"


def rows_of_steps():
    """Yields the milliseconds of a step of each method, and the gains of the best."""
    for cell in cells():
        found = cell["rows"]
        steps = [f"{1e3 * found[name]['step']:,.0f}" for name in paper.METHODS]
        piped = [row for name, row in found.items() if name.startswith("Pipe-SGD")]
        best = min(piped, key=lambda row: row["step"])["faster_than"]
        gains = [f"{best[name]:.1f}" for name in ("PS-Sync", "D-Sync")]
        yield f"| {titles(cell)} | " + " | ".join([*steps, *gains]) + " |"


def rows_of_parts():
    """Yields the milliseconds of compute, and of each exchange and its codec."""
    for cell in cells():
        found = cell["rows"]
        shown = [f"{1e3 * found['D-Sync']['compute']:,.0f}"]
        for name in paper.PROFILED:
            codec, exchange = (1e3 * found[name][key] for key in ("codec", "exchange"))
            shown.append(f"{codec:,.0f} + {exchange:,.0f}")
        explained = [row["explained"] for row in found.values() if "explained" in row]
        shown.append(f"{min(explained):.2f} to {max(explained):.2f}")
        yield f"| {titles(cell)} | " + " | ".join(shown) + " |"


def words_on_alexnet():
    """Yields how long the cores work in a pipelined step of AlexNet."""
    (rows,) = (x["rows"] for x in cells() if x["problem"]["model"] == "alexnet")
    cores = [row["cores"] for name, row in rows.items() if name.startswith("Pipe-SGD")]
    assert rows["Pipe-SGD, int8"]["step"] > rows["D-Sync, int8"]["step"]
    yield f"busy for {min(cores):.1f} to {max(cores):.1f} seconds"


def rows_of_scaling():
    return lines(scaling.table(result("scaling")["cells"]))


def words_on_scaling():
    """Yields the efficiencies of Pipe-SGD, measured and simulated."""
    found = result("scaling")["cells"]
    measured = [cell["measured"]["Pipe-SGD"][1] for cell in found if cell["measured"]]
    most = found[-1]
    assert most["hosts"] == 4096
    simulated = most["simulated"]["Pipe-SGD"]
    least = min(measured)
    yield f"{least:.2f} to {max(measured):.2f} measured on up to 8 hosts"
    yield f"{simulated:.2f} simulated on 4,096"
    yield f"efficiency {least:.2f} on 8 hosts, and {simulated:.2f} simulated on 4,096"


@pytest.mark.parametrize(
    "rows",
    [rows_of_steps, rows_of_parts, rows_of_scaling, words_on_scaling, words_on_alexnet],
)
def test_figures_equal_the_result_files(rows):
    assert_shown("docs/paper.md", rows())
