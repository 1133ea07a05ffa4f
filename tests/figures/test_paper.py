"""Tests what the page on the paper says about its claims, benchmarks and scaling."""

import statistics

from experiments.report import result
from experiments.tables import _speed

from .quoted import column, least_and_most, quoted_in

quoted = quoted_in("docs/paper.md")


def range_of(table, title):
    values = column(table, title)
    return f"{min(values):.1f} to {max(values):.1f} times as fast"


@quoted
def test_gains_with_the_codecs_of_the_paper_are_quoted():
    server, sync = (
        range_of("paper.steps", x) for x in ("as fast as PS-Sync", "as D-Sync")
    )
    yield f"with the paper's own codecs, {server} as PS-Sync and {sync} as D-Sync"


@quoted
def test_gains_on_other_models_are_quoted():
    fastest = least_and_most(column("speedup.steps", "times as fast as PS-Sync"))
    yield f"mostly PowerSGD, Pipe-SGD is {fastest} times as fast as PS-Sync"
    cells = dict(_speed.cells()).values()
    plain = [rows["Pipe-SGD"]["faster_than"]["D-Sync"][1] for rows in cells]
    without = least_and_most(plain)
    yield f"Without a codec, Pipe-SGD is {without} times as fast as D-Sync in"


@quoted
def test_accuracy_lost_by_a_plain_delay_is_quoted():
    runs = result("time_to_accuracy_cifar10")["runs"].values()
    sync, plain = (
        statistics.mean(run[method]["accuracy"][-1] for run in runs)
        for method in ("D-Sync", "Pipe-SGD, plain")
    )
    yield f"plain delay ends {100 * (sync - plain):.1f} points lower"


@quoted
def test_cores_in_a_pipelined_step_of_alexnet():
    cells = result("paper")["cells"]
    (rows,) = (x["rows"] for x in cells if x["problem"]["model"] == "alexnet")
    cores = [row["cores"] for name, row in rows.items() if name.startswith("Pipe-SGD")]
    assert rows["Pipe-SGD, int8"]["step"] > rows["D-Sync, int8"]["step"]
    yield f"busy for {min(cores):.1f} to {max(cores):.1f} seconds"


@quoted
def test_efficiency_figures_are_quoted():
    found = result("scaling")["cells"]
    measured = [cell["measured"]["Pipe-SGD"][1] for cell in found if cell["measured"]]
    assert found[-1]["hosts"] == 4096
    yield f"efficiency {min(measured):.2f} on 8 hosts with sleep for compute, and"
    yield f"and {found[-1]['simulated']['Pipe-SGD']:.2f} simulated on 4,096"
