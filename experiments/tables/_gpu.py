"""Makes the tables of what was measured on an H100."""

import statistics
from typing import Any

from experiments import overhead, report
from experiments.report import result

STEPS = (
    *("width 1", "width 2, plain", "width 2, predicted"),
    "width 2, sharded optimizer",
)


def found(part: str) -> dict[str, Any]:
    """Returns the figures of a part of `experiments.gpu`."""
    cells = result("gpu_1_x_nvidia_h100_80gb_hbm3")["cells"]
    (figures,) = (cell["found"] for cell in cells if cell["part"] == part)
    return figures


def steps() -> list[list[str]]:
    """Returns the table of steps over equivalent steps by hand."""
    table = [["model", "by hand, ms", "the check alone", *STEPS]]
    for model in ("mlp", "cnn", "resnet18", "transformer", "transformer scan"):
        variants = found(f"steps:{model}")
        rows = (overhead.judged(variants, name) for name in STEPS)
        ratios = (
            row["ratio"].values() for row in (variants["by hand, checked"], *rows)
        )
        ms = variants["by hand"]["ms_per_step"]
        table.append([model, f"{ms:.1f}", *map(report.spread, ratios)])
    return table


def codecs() -> list[list[str]]:
    """Returns the table of the speeds of codecs, relative to a copy."""
    speeds = found("codecs")
    limit = speeds["copy"]["gigabytes_per_second"]
    table = [["codec", "encoding, of the copy's speed", "decoding"]]
    table.append([f"copy, the limit: {limit:,.0f} GB/s", "1.00", "1.00"])
    names = dict.fromkeys(key.rpartition(", ")[0] for key in speeds if ", " in key)
    for name in names:
        ways = (speeds[f"{name}, {way}"] for way in ("encode", "decode"))
        table.append([name, *(f"{way['of_the_copy']:.2f}" for way in ways)])
    return table


def memory() -> list[list[str]]:
    """Returns the table of MB that the allocator and the program count."""
    models = {"transformer": "transformer", "resnet18": "ResNet-18"}
    counts = ("allocator", "program")
    titles = (f"{model}, {count}" for model in models.values() for count in counts)
    table = [["step", *titles]]
    for step in STEPS:
        row = [step]
        for model in models:
            cell = found(f"memory:{model}:{step}")
            peak, live = cell["allocator"]["peak_bytes_in_use"], cell["program"]["live"]
            row += [f"{1e-6 * peak:,.0f}", f"{1e-6 * live:,.0f}"]
        table.append(row)
    return table


def link() -> list[list[str]]:
    """Returns the table of a step of the host executor beside its parts."""
    figures = found("hosts:1gbit:psum")
    names = ("compute", "communication", "step")
    compute, exchange, step = (1e3 * statistics.median(figures[x]) for x in names)
    wire = 1e3 * figures["wire_bytes"] / (1e9 / 8)
    times = ["compute, ms", "exchange, ms", "its bytes at 1 Gbit/s, ms", "step, ms"]
    shown = (f"{ms:.0f}" for ms in (compute, exchange, wire, step))
    limit = max(compute, exchange)
    ratios = (f"{x / limit:.2f}" for x in (step, compute + exchange))
    return [[*times, "step / limit", "if nothing were hidden"], [*shown, *ratios]]
