"""Tests what the documents say about steps and about accuracy over time."""

import statistics

import numpy as np

from experiments.report import result
from experiments.tables import _speed
from experiments.text_race import __main__ as race

from .quoted import quoted_in

CELLS = dict(_speed.cells())


def test_convolutions_are_faster_under_ddp():
    """Ours is on the wide MLP, relative to its compute; DDP is on convolutions."""
    for title, rows in CELLS.items():
        hook, best = _speed.fastest(rows)
        if title.startswith("wide_mlp"):
            assert rows[best]["ratio_to_compute"] < rows[hook]["ratio_to_compute"]
        if title.startswith(("cnn", "resnet18")):
            assert rows["DDP compute"]["step"] < rows["compute"]["step"]
            assert rows[hook]["step"] < rows[best]["step"]


@quoted_in("docs/benchmarks/speed.md")
def test_time_of_a_call_is_quoted():
    python = result("overhead")["python_microseconds"]["width 1"]["median"]
    yield f"takes {python:.0f} microseconds longer than its program"


@quoted_in("docs/benchmarks/speed.md")
def test_kernels_of_a_checked_step_are_quoted():
    for cell in result("kernels")["cells"]:
        ours, checked = (sum(cell[x].values()) for x in ("pipejax", "by hand, checked"))
        assert ours < checked, cell
    yield "pipejax starts fewer kernels in every case"


def ends(race, what="accuracy"):
    """Returns the last values by method: means over seeds."""
    runs = list(result(f"time_to_accuracy_{race}")["runs"].values())
    return {
        method: statistics.mean(run[method][what][-1] for run in runs)
        for method in runs[0]
    }


@quoted_in("README.md", "docs/benchmarks/speed.md")
def test_size_of_the_wide_model_is_quoted():
    cells = result("speedup")["cells"]
    (elements,) = {x["elements"] for x in cells if x["problem"]["model"] == "wide_mlp"}
    yield f"{1e-6 * elements:.1f} million parameters"


@quoted_in("README.md")
def test_race_is_quoted():
    """Accuracies are equal to half a point."""
    accuracy, seconds = ends("cifar10"), ends("cifar10", "seconds")
    for name in ("Pipe-SGD", "Pipe-SGD, int8"):
        assert abs(accuracy[name] - accuracy["D-Sync"]) < 0.005
    own, coded, sync, ddp = (
        seconds[name] for name in ("Pipe-SGD", "Pipe-SGD, int8", "D-Sync", "DDP")
    )
    yield f"in {own / sync:.2f} of its time, with 8-bit gradients in {coded / sync:.2f}"
    yield f"Pipe-SGD ends in {own / ddp:.2f} of DDP's time"


@quoted_in("docs/benchmarks/compression.md")
def test_accuracy_lost_with_power_sgd_is_quoted():
    accuracy = ends("mnist")
    ours, ddp = (
        100 * (accuracy["D-Sync"] - accuracy[f"{name}, PowerSGD"])
        for name in ("Pipe-SGD", "DDP")
    )
    yield f"costs Pipe-SGD {ours:.1f} points and DDP {ddp:.1f}"


@quoted_in("docs/benchmarks/speed.md")
def test_race_on_text_is_described():
    """Within 0.01 nats, local steps lead until they end."""
    runs = {x["method"]: x["curve"] for x in result("text_race")["cells"]}
    ends = {name: run["loss"][-1] for name, run in runs.items()}
    near = [name for name in ends if ends[name] < min(ends.values()) + 0.05]
    assert [name for name in near if "DDP, " in name] == ["DDP, fp16"]
    times = {name: run["seconds"] for name, run in runs.items()}
    coded = "Pipe-SGD, int4 fed back"
    assert race.until(runs[coded], 1.95) < race.until(runs["DDP, fp16"], 1.95) / 2
    local = "local steps, int4"
    for name in runs:
        pairs = zip(times[local], runs[local]["loss"], strict=True)
        for at, lost in [pair for pair in pairs if pair[0] >= times[name][0]]:
            assert lost < np.interp(at, times[name], runs[name]["loss"]) + 0.01, name
    assert ends[coded] < ends[local]
    yield "only fp16 gets within 0.05 nats"
