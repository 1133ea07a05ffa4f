"""Makes the tables of the paper's benchmarks."""

from typing import Any

from experiments import paper

_CELL = "model, gradients, links"


def steps(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the milliseconds of a step of each method, and the gains of the best."""
    table = [[_CELL, *paper.METHODS, "as fast as PS-Sync", "as D-Sync"]]
    for cell in cells:
        found = cell["rows"]
        times = (f"{1e3 * found[name]['step']:,.0f}" for name in paper.METHODS)
        piped = [row for name, row in found.items() if name.startswith("Pipe-SGD")]
        best = min(piped, key=lambda row: row["step"])["faster_than"]
        gains = (f"{best[name]:.1f}" for name in ("PS-Sync", "D-Sync"))
        table.append([_title(cell), *times, *gains])
    return table


def parts(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the milliseconds of compute, and of each exchange and its codec."""
    rings = ["ring, uncompressed", "ring, truncate", "ring, int8"]
    server = "parameter server, codec + rest"
    table = [[_CELL, "compute", server, *rings, "explained"]]
    for cell in cells:
        found = cell["rows"]
        shown = [f"{1e3 * found['D-Sync']['compute']:,.0f}"]
        for name in paper.PROFILED:
            codec, exchange = (1e3 * found[name][key] for key in ("codec", "exchange"))
            shown.append(f"{codec:,.0f} + {exchange:,.0f}")
        explained = [row["explained"] for row in found.values() if "explained" in row]
        shown.append(f"{min(explained):.2f} to {max(explained):.2f}")
        table.append([_title(cell), *shown])
    return table


def _title(cell: dict[str, Any]) -> str:
    model, megabytes = cell["problem"]["model"], 4 * cell["elements"] / 1e6
    return f"{model}, {megabytes:.1f} MB, {cell['rate']}"
