"""Tests what the documents say about steps and about accuracy over time."""

import collections
import statistics

import numpy as np

from experiments.report import result
from experiments.tables import _speed
from experiments.text_race import __main__ as race

from .quoted import quoted_in

CELLS = dict(_speed.cells())


@quoted_in("docs/benchmarks/speed.md")
def test_convolutions_are_faster_under_ddp():
    """Ours is on the wide MLP, relative to its compute, but for two cells."""
    longer = []
    for title, rows in CELLS.items():
        hook, best = _speed.fastest(rows)
        slower = rows[best]["ratio_to_compute"] >= rows[hook]["ratio_to_compute"]
        if title.startswith("wide_mlp") and slower:
            longer.append(title.rsplit(", ")[-1].replace("mbit", " Mbit/s"))
        if title.startswith(("cnn", "resnet18")):
            assert rows["DDP compute"]["step"] < rows["compute"]["step"]
            assert rows[hook]["step"] < rows[best]["step"]
    assert len(longer) == 2
    yield f"shorter in three cells, and longer at {' and '.join(longer)}"


@quoted_in("docs/benchmarks/speed.md")
def test_time_on_the_wide_model_relative_to_ddp_is_quoted():
    wide = [rows for title, rows in CELLS.items() if title.startswith("wide_mlp")]
    ours, ddp = "Pipe-SGD, PowerSGD", "DDP, PowerSGD"
    times = sorted(rows[ours]["step"] / rows[ddp]["step"] for rows in wide)
    yield f"takes {times[0]:.2f} to {times[-1]:.2f} of the time of DDP's"


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


@quoted_in("docs/benchmarks/compression.md")
def test_accuracy_lost_with_power_sgd_is_quoted():
    accuracy = ends("mnist")
    ours, ddp = (
        100 * (accuracy["D-Sync"] - accuracy[f"{name}, PowerSGD"])
        for name in ("Pipe-SGD", "DDP")
    )
    yield f"costs Pipe-SGD {ours:.1f} points and DDP {ddp:.1f}"


def text_runs():
    """Returns seconds and losses of each way to train, as means over seeds."""
    cells = result("text_race")["cells"]
    runs = {}
    for name in dict.fromkeys(cell["method"] for cell in cells):
        curves = [cell["curve"] for cell in cells if cell["method"] == name]
        means = {key: np.mean([x[key] for x in curves], axis=0) for key in curves[0]}
        runs[name] = {"seconds": means["seconds"], "loss": means["loss"]}
    return runs


CODED, LOCAL, HOOK = "Pipe-SGD, int4 fed back", "local steps, int4", "DDP, fp16"
WAITS = "D-Sync, int4 fed back"  # the same codec without a pipeline


@quoted_in("docs/benchmarks/speed.md")
def test_race_on_text_is_described():
    """Within 0.01 nats, local steps lead until they end."""
    runs = text_runs()
    ends = {name: run["loss"][-1] for name, run in runs.items()}
    near = [name for name in ends if ends[name] < min(ends.values()) + 0.05]
    assert [name for name in near if "DDP, " in name] == [HOOK]
    assert race.until(runs[CODED], 1.95) < race.until(runs[HOOK], 1.95) / 2
    for name, run in runs.items():
        pairs = zip(runs[LOCAL]["seconds"], runs[LOCAL]["loss"], strict=True)
        for at, lost in [pair for pair in pairs if pair[0] >= run["seconds"][0]]:
            assert lost < np.interp(at, run["seconds"], run["loss"]) + 0.01, name
    assert ends[CODED] < ends[LOCAL]
    assert abs(ends[CODED] - ends[WAITS]) < 0.005
    share = runs[CODED]["seconds"][-1] / runs[WAITS]["seconds"][-1]
    yield "only fp16 gets within 0.05 nats"
    yield f"with its exchange hidden, it takes {share:.2f} of the time"


@quoted_in("README.md")
def test_race_on_text_is_quoted():
    runs = text_runs()
    loss, seconds = (
        {name: run[key][-1] for name, run in runs.items()}
        for key in ("loss", "seconds")
    )
    assert loss[CODED] - min(loss["D-Sync"], loss[HOOK]) < 0.01
    hooks = [name for name in loss if name.startswith("DDP, ")]
    assert [x for x in hooks if loss[x] < loss[CODED] + 0.02] == [HOOK]
    sync, waits, hook = (seconds[CODED] / seconds[x] for x in ("D-Sync", WAITS, HOOK))
    yield f"synchronous training in {sync:.2f} of its time"
    yield f"{waits:.2f} of the time of synchronous training with the same 4 bits"
    yield f"and {hook:.2f} of that of DDP with fp16"


@quoted_in("docs/benchmarks/compression.md")
def test_loss_of_codecs_on_text_is_quoted():
    """Seeds share parameters and batches, so differences are taken for each seed."""
    cells = result("text_race")["cells"]
    ends = {(x["method"], x["seed"]): x["curve"]["loss"][-1] for x in cells}
    for codec in ("int8", "int4"):
        name = f"Pipe-SGD, {codec} fed back"
        above = [ends[name, seed] - ends["D-Sync", seed] for seed in range(3)]
        error = statistics.stdev(above) / 3**0.5
        yield f"by {statistics.mean(above):+.3f} ± {error:.3f}"


@quoted_in("README.md")
def test_seeds_of_the_race_on_text_are_stated():
    cells = result("text_race")["cells"]
    seeds = collections.Counter(cell["method"] for cell in cells)
    once = {"DDP", "Pipe-SGD"}
    assert {name for name, count in seeds.items() if count == 1} == once
    assert {*seeds.values()} == {1, 3}
    yield "Three seeds; uncompressed DDP and Pipe-SGD have one."
