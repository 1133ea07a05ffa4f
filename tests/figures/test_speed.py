"""Tests what the documents say about steps and about accuracy over time."""

import statistics

from experiments.report import result
from experiments.tables import _speed

from .quoted import column, least_and_most, quoted_in

CELLS = dict(_speed.cells())


@quoted_in("docs/speed.md")
def test_step_times_are_quoted():
    wide = [rows for title, rows in CELLS.items() if title.startswith("wide_mlp")]
    ours, theirs = (
        [rows[f"{name}, PowerSGD"] for rows in wide] for name in ("Pipe-SGD", "DDP")
    )
    for rows, row in zip(wide, ours, strict=True):
        hook, _ = _speed.fastest(rows)
        assert row["ratio_to_compute"] < rows[hook]["ratio_to_compute"]
    for title, rows in CELLS.items():
        if title.startswith(("cnn", "resnet18")):
            hook, best = _speed.fastest(rows)
            assert rows["DDP compute"]["step"] < rows["compute"]["step"]
            assert rows[hook]["step"] < rows[best]["step"]
    pipe, ddp = (
        least_and_most([row["ratio_to_compute"] for row in rows])
        for rows in (ours, theirs)
    )
    yield f"With PowerSGD, a step of the wide MLP takes {pipe} times the compute"
    yield f"a step of DDP with PowerSGD takes {ddp} times"
    small = [x["Pipe-SGD, PowerSGD"] for t, x in CELLS.items() if "mlp, 512" in t]
    cores = least_and_most([row["step"] / row["cores"] for row in small])
    yield f"With PowerSGD, a step takes {cores} times as long as the cores work"
    gloo = [
        statistics.median(cell["measured"]["Pipe-SGD"]["communication"])
        / cell["rows"]["Pipe-SGD"]["wire"]
        for cell in result("speedup")["cells"]
        if cell["measured"]
    ]
    yield f"Gloo's all-reduce alone takes {least_and_most(gloo)} times"


@quoted_in("docs/speed.md")
def test_overhead_figures_are_quoted():
    record, ratios = result("overhead"), []
    for name in ("width 1", "width 2, plain", "width 2, predicted"):
        judged = [f"{x[name]['judged']:.2f}" for x in record["models"].values()]
        assert [f"{x:.2f}" for x in column("overhead", name)] == judged
        ratios += judged
    yield f"at most {max(ratios)} times"
    cpu = record["cpu"]
    yield f"{cpu['cores']} cores of an {cpu['model']} with {cpu['vectors'].upper()}"
    python = record["python_microseconds"]["width 1"]["median"]
    yield f"takes {python:.0f} microseconds longer than its program"


@quoted_in("docs/speed.md")
def test_compile_times_are_quoted():
    widths = ("width 1", "width 2, plain", "width 2, predicted")
    most = max(max(column("compile_time", width)) for width in widths)
    yield f"at most {most:.2f} times as long to trace and compile"
    row = result("compile_time")["leaves"]["800"]["K=2, predicted"]
    yield f"{row['to_the_shortest']:.1f} times as long"


def ends(race, what="accuracy"):
    """Returns the last values by method: means over seeds."""
    runs = list(result(f"time_to_accuracy_{race}")["runs"].values())
    return {
        method: statistics.mean(run[method][what][-1] for run in runs)
        for method in runs[0]
    }


def share(race, method, other):
    """Returns the time of a method divided by that of another method."""
    seconds = ends(race, "seconds")
    return f"{seconds[method] / seconds[other]:.2f}"


def lower_with_a_plain_delay():
    accuracy = ends("cifar10")
    lost = 100 * (accuracy["D-Sync"] - accuracy["Pipe-SGD, plain"])
    return f"plain delay ends {lost:.1f} points lower"


@quoted_in("docs/speed.md")
def test_race_figures_are_quoted():
    sync, ddp = (share("cifar10", "Pipe-SGD", x) for x in ("D-Sync", "DDP"))
    yield f"in {sync} of the time of D-Sync and {ddp} of the time of DDP"
    sync, ddp = (share("cifar10", "Pipe-SGD, int8", x) for x in ("D-Sync", "DDP"))
    yield f"With 8 bits it takes {sync} and {ddp}"
    yield f"A {lower_with_a_plain_delay()}"
    yield f"in {share('mnist', 'Pipe-SGD, int8', 'D-Sync')} of D-Sync's time"


@quoted_in("README.md")
def test_race_caption_quotes_figures():
    """Accuracies are equal to half a point."""
    accuracy = ends("cifar10")
    for name in ("Pipe-SGD", "Pipe-SGD, int8"):
        assert abs(accuracy[name] - accuracy["D-Sync"]) < 0.005
    sync, ddp = (share("cifar10", "Pipe-SGD", x) for x in ("D-Sync", "DDP"))
    yield f"in {sync} of its time and {ddp} of DDP's"
    coded = share("cifar10", "Pipe-SGD, int8", "D-Sync")
    yield f"with 8-bit gradients in {coded}"


@quoted_in("docs/speed.md", "docs/benchmarks/compression.md")
def test_accuracy_lost_with_power_sgd_is_quoted():
    accuracy = ends("mnist")
    ours, ddp = (
        100 * (accuracy["D-Sync"] - accuracy[f"{name}, PowerSGD"])
        for name in ("Pipe-SGD", "DDP")
    )
    yield f"costs Pipe-SGD {ours:.1f} points and DDP {ddp:.1f}"
