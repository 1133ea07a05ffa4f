"""Tests what the page on the paper says about its benchmarks and about scaling."""

from experiments.report import result

from .quoted import least_and_most, quoted_in


@quoted_in("docs/paper.md")
def test_cores_in_a_pipelined_step_of_alexnet():
    cells = result("paper")["cells"]
    (rows,) = (x["rows"] for x in cells if x["problem"]["model"] == "alexnet")
    cores = [row["cores"] for name, row in rows.items() if name.startswith("Pipe-SGD")]
    assert rows["Pipe-SGD, int8"]["step"] > rows["D-Sync, int8"]["step"]
    yield f"busy for {min(cores):.1f} to {max(cores):.1f} seconds"


@quoted_in("docs/paper.md")
def test_efficiency_figures_are_quoted():
    found = result("scaling")["cells"]
    measured = [cell["measured"]["Pipe-SGD"][1] for cell in found if cell["measured"]]
    assert found[-1]["hosts"] == 4096
    simulated = found[-1]["simulated"]["Pipe-SGD"]
    yield f"{least_and_most(measured)} measured on up to 8 hosts"
    yield f"{simulated:.2f} simulated on 4,096"
    yield (
        f"efficiency {min(measured):.2f} on 8 hosts, and {simulated:.2f} simulated on"
        " 4,096"
    )
