"""Makes the tables of step times."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from experiments import report
from experiments.report import result

_CELL = "model, batch a host, links"
_OURS = ("Pipe-SGD", "Pipe-SGD, int8", "Pipe-SGD, PowerSGD")


def cells() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each model on each network: its title, and the rows of the methods."""
    for cell in result("speedup")["cells"]:
        yield title(cell), cell["rows"]


def title(cell: dict[str, Any]) -> str:
    """Returns the model, the batch of a host and the rate of the links."""
    problem = cell["problem"]
    return f"{problem['model']}, {problem['batch_size']}, {cell['rate']}"


def fastest(rows: dict[str, Any]) -> tuple[str, str]:
    """Returns DDP's fastest hook, and the fastest Pipe-SGD with weight prediction.

    The fastest Pipe-SGD has a codec, unless none is faster than without one.
    """

    def best(start: str) -> str:
        names = (name for name in rows if name.startswith(start))
        return min(names, key=lambda name: rows[name]["step"])

    return best("DDP, "), best("Pipe-SGD")


def gains() -> list[list[str]]:
    """Returns the table of steps over the compute of their framework."""
    names = ["D-Sync", "PyTorch DDP", "DDP, fastest hook"]
    table = [[_CELL, *names, "Pipe-SGD", "Pipe-SGD, fastest codec"]]
    for name, rows in cells():
        shown = _shown(rows, lambda row: f"{row['ratio_to_compute']:.2f}")
        table.append([name, *shown[1:]])
    return table


def steps() -> list[list[str]]:
    """Returns the table of milliseconds a step, and of the best ratios."""
    names = ["PS-Sync", "D-Sync", "DDP", "DDP, fastest hook"]
    ours = ["Pipe-SGD", "Pipe-SGD, fastest codec"]
    ratios = ["times as fast as PS-Sync", "as D-Sync", "as DDP, fastest hook"]
    table = [[_CELL, "compute", "DDP compute", "wire", *names, *ours, *ratios]]
    for name, rows in cells():
        hook, best = fastest(rows)
        own = [rows[x]["step"] for x in ("compute", "DDP compute")]
        table.append(
            [
                name,
                *(_ms(x) for x in (*own, rows["D-Sync"]["wire"])),
                *_shown(rows, lambda row: _ms(row["step"])),
                *(
                    report.spread(rows[best]["faster_than"][other])
                    for other in ("PS-Sync", "D-Sync", hook)
                ),
            ]
        )
    return table


def _shown(rows: dict[str, Any], show: Callable[[Any], str]) -> list[str]:
    """Returns a cell for each compared method; a hook or a codec stands in brackets."""
    hook, ours = fastest(rows)
    return [
        *(show(rows[name]) for name in ("PS-Sync", "D-Sync", "DDP")),
        f"{show(rows[hook])} ({hook.rpartition(', ')[2]})",
        show(rows["Pipe-SGD"]),
        f"{show(rows[ours])} ({ours.rpartition(', ')[2]})",
    ]


def limits() -> list[list[str]]:
    """Returns the table of steps of the wide MLP, over each of their limits."""
    ms = ["step, ms", "own compute, ms", "wire, ms", "cores, ms"]
    ratios = ["step / longer of compute and wire", "step / longest of the three"]
    table = [[_CELL, "method", *ms, *ratios]]
    for name, rows in cells():
        if not name.startswith("wide_mlp, 512"):
            continue
        for method in (*_OURS, "DDP, PowerSGD"):
            row = rows[method]
            ddp = method.startswith("DDP")
            own = rows["DDP compute" if ddp else "compute"]["step"]
            parts = own, row["wire"], row["cores"]
            shown = map(_ms, (row["step"], *parts))
            over = (f"{row['step'] / max(x):.2f}" for x in (parts[:2], parts))
            table.append([name, method, *shown, *over])
    return table


def measured() -> list[list[str]]:
    """Returns the table of steps over the longer of their measured parts."""
    table = [[_CELL, *_OURS]]
    for cell in result("speedup")["cells"]:
        if found := cell["measured"].values():
            ratios = (statistics.quantiles(x["ratio"], n=4) for x in found)
            table.append([title(cell), *map(report.spread, ratios)])
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"
