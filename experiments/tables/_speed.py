"""Makes the tables of step times."""

import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from experiments import report, time_to_accuracy
from experiments.report import result

_CELL = "model, batch a host, links"
_OURS = ("Pipe-SGD", "Pipe-SGD, int8", "Pipe-SGD, PowerSGD")
_WORDS = {"wide_mlp": "wide MLP", "mlp": "MLP", "cnn": "CNN", "resnet18": "ResNet-18"}
_USUAL = {("wide_mlp", 512), ("mlp", 256), ("cnn", 32), ("resnet18", 4)}
_COMPUTE = {
    "compute": "compute alone, JAX",
    "DDP compute": "compute alone, PyTorch",
}
_HEADLINE = (
    *_COMPUTE,
    *("D-Sync", "D-Sync, int8", "DDP", "DDP, fp16", "DDP, PowerSGD"),
    *_OURS,
)
_RACES = {"MNIST": "time_to_accuracy_mnist", "CIFAR-10": "time_to_accuracy_cifar10"}


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
        names = (x for x in rows if x.startswith(start) and not x.endswith("plain"))
        return min(names, key=lambda name: rows[name]["step"])

    return best("DDP, "), best("Pipe-SGD")


def methods() -> list[list[str]]:
    """Returns the table of all methods: ms per step, and the cost in accuracy."""
    found = result("speedup")["cells"]
    names = [name for name in found[0]["rows"] if name not in _COMPUTE]
    return _methods(found, [*_COMPUTE, *names])


def headline() -> list[list[str]]:
    """Returns the same table for three models, and for methods without a server."""
    found = {title(cell): cell for cell in result("speedup")["cells"]}
    shown = ("wide_mlp, 512, 500mbit", "cnn, 32, 100mbit", "resnet18, 4, 500mbit")
    return _methods([found[name] for name in shown], _HEADLINE)


def _methods(found: list[dict[str, Any]], names: Iterable[str]) -> list[list[str]]:
    """Returns a row for each method, the fastest in the first cell first."""
    titles = [f"{_WORDS[x['problem']['model']]}, {_rate(x)}, ms" for x in found]
    changes = [f"{name}, points" for name in _RACES]
    rows = [
        [
            _COMPUTE.get(name, name),
            *(_ms(cell["rows"][name]["step"]) for cell in found),
            *("" if name in _COMPUTE else change(race, name) for race in _RACES),
        ]
        for name in sorted(names, key=lambda name: found[0]["rows"][name]["step"])
    ]
    return [["method", *titles, *changes], *rows]


def _rate(cell: dict[str, Any]) -> str:
    """Returns the batch, if there are several cells of a model, and the rate."""
    number, unit = cell["rate"][:-4], cell["rate"][-4].upper()
    batch = cell["problem"]["batch_size"]
    shown = "" if (cell["problem"]["model"], batch) in _USUAL else f"batch {batch:,}, "
    return f"{shown}{number} {unit}bit/s"


def change(race: str, method: str) -> str:
    """Returns the change of final test accuracy from D-Sync in points.

    Runs with the same seed are compared: the mean, and its standard error.
    """
    runs = result(_RACES[race])["runs"].values()
    ends = [
        [100 * run[name]["accuracy"][-1] for name in (method, "D-Sync")]
        for run in runs
        if "accuracy" in run.get(method, {})
    ]
    if not ends:
        return "not measured"
    if method == "D-Sync":
        return "0"
    changes = [own - twin for own, twin in ends]
    error = statistics.stdev(changes) / len(changes) ** 0.5
    return f"{statistics.mean(changes):+.2f} ± {error:.2f}"


def race(name: str) -> list[list[str]]:
    """Returns the table of a race, with times over those of D-Sync and of DDP."""
    titles, *rows = time_to_accuracy.rows(result(_RACES[name]))
    seconds = {
        row[0]: statistics.mean(run[row[0]]["seconds"][-1] for run in _runs(name))
        for row in rows
    }
    others = ("D-Sync", "DDP")
    more = ["points from D-Sync", *(f"time over {other}'s" for other in others)]
    return [
        ["method", *titles[1:], *more],
        *(
            [
                *row,
                change(name, row[0]),
                *(f"{seconds[row[0]] / seconds[other]:.2f}" for other in others),
            ]
            for row in rows
        ),
    ]


def _runs(name: str) -> list[dict[str, Any]]:
    return list(result(_RACES[name])["runs"].values())


def steps() -> list[list[str]]:
    """Returns the table of the fastest steps, and of ratios to other methods."""
    times = ["compute", "DDP compute", "wire", "DDP, fastest hook"]
    ratios = ["times as fast as PS-Sync", "as D-Sync", "as DDP, fastest hook"]
    table = [[_CELL, *times, "Pipe-SGD, fastest codec", *ratios]]
    for name, rows in cells():
        hook, best = fastest(rows)
        own = [rows[x]["step"] for x in ("compute", "DDP compute")]
        table.append(
            [
                name,
                *(_ms(x) for x in (*own, rows["D-Sync"]["wire"])),
                *(
                    f"{_ms(rows[x]['step'])} ({x.rpartition(', ')[2]})"
                    for x in (hook, best)
                ),
                *(
                    report.spread(rows[best]["faster_than"][other])
                    for other in ("PS-Sync", "D-Sync", hook)
                ),
            ]
        )
    return table


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
    table = [[_CELL, *_OURS, "exchange of Pipe-SGD alone / wire"]]
    for cell in result("speedup")["cells"]:
        if found := cell["measured"]:
            ratios = (report.quartiles(x["ratio"]) for x in found.values())
            exchange = statistics.median(found["Pipe-SGD"]["communication"])
            over_wire = f"{exchange / cell['rows']['Pipe-SGD']['wire']:.2f}"
            table.append([title(cell), *map(report.spread, ratios), over_wire])
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"
