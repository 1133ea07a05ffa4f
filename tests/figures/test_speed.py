"""Tests that the documents show the results on steps and accuracy over time."""

import functools
import statistics

import pytest

from experiments import time_to_accuracy

from .results import assert_shown, judged, lines, result, with_quartiles


def titled(cell):
    """Returns the rows of one model on one network, and their title."""
    problem = cell["problem"]
    return cell["rows"], f"{problem['model']}, {problem['batch_size']}, {cell['rate']}"


def cells_of_speedup():
    return [titled(cell) for cell in result("speedup")["cells"]]


def best(rows, start):
    """Returns the fastest method whose name begins with `start`."""
    return min(
        (name for name in rows if name.startswith(start)),
        key=lambda name: rows[name]["step"],
    )


def hook_and_codec(rows):
    """Returns DDP's fastest hook, and the fastest Pipe-SGD with weight prediction.

    The fastest Pipe-SGD has a codec, unless none is faster than without one.
    """
    return best(rows, "DDP, "), best(rows, "Pipe-SGD")


def short(name):
    return name.rpartition(", ")[2]


def rows_of_gain():
    """Yields a row for each model and rate: steps over their framework's compute."""
    for rows, title in cells_of_speedup():
        hook, ours = hook_and_codec(rows)
        cells = [
            f"{rows[name]['ratio_to_compute']:.2f}"
            for name in ("D-Sync", "DDP", hook, "Pipe-SGD", ours)
        ]
        cells[2] += f" ({short(hook)})"
        cells[4] += f" ({short(ours)})"
        yield f"| {title} | " + " | ".join(cells) + " |"


def rows_of_speedup():
    """Yields a row for each model and rate: milliseconds a step, and best ratios."""
    for rows, title in cells_of_speedup():
        hook, ours = hook_and_codec(rows)
        steps = [rows["compute"]["step"], rows["DDP compute"]["step"]]
        steps += [rows["D-Sync"]["wire"]]
        names = ("PS-Sync", "D-Sync", "DDP", hook, "Pipe-SGD", ours)
        steps += [rows[name]["step"] for name in names]
        cells = [f"{1e3 * x:,.0f}" for x in steps]
        cells[6] += f" ({short(hook)})"
        cells[8] += f" ({short(ours)})"
        for other in ("PS-Sync", "D-Sync", hook):
            low, middle, high = rows[ours]["faster_than"][other]
            cells.append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
        yield f"| {title} | " + " | ".join(cells) + " |"


LIMITED = ("Pipe-SGD", "Pipe-SGD, int8", "Pipe-SGD, PowerSGD", "DDP, PowerSGD")


def rows_of_limits():
    """Yields steps of the wide MLP over each of their limits and over the longest."""
    for rows, title in cells_of_speedup():
        if not title.startswith("wide_mlp, 512"):
            continue
        for name in LIMITED:
            row = rows[name]
            own = rows["DDP compute" if name.startswith("DDP") else "compute"]["step"]
            limits = own, row["wire"], row["cores"]
            ms = [f"{1e3 * x:,.0f}" for x in (row["step"], *limits)]
            ratios = [f"{row['step'] / max(x):.2f}" for x in (limits[:2], limits)]
            yield f"| {title} | {name} | " + " | ".join([*ms, *ratios]) + " |"


def rows_of_measured():
    """Yields a row for each model and rate: steps over their longer part."""
    for cell in result("speedup")["cells"]:
        if cell["measured"]:
            _, title = titled(cell)
            ratios = [each["ratio"] for each in cell["measured"].values()]
            yield f"| {title} | " + " | ".join(map(_of_rounds, ratios)) + " |"


def _of_rounds(ratios):
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def words_on_steps():
    """Yields PowerSGD's steps over compute and cores, and Gloo's over the wire."""
    wide = [rows for rows, title in cells_of_speedup() if title.startswith("wide_mlp")]
    both = [
        _least_and_most(rows[f"{name}, PowerSGD"]["ratio_to_compute"] for rows in wide)
        for name in ("Pipe-SGD", "DDP")
    ]
    yield f"With PowerSGD, a step of the wide MLP takes {both[0]} times the compute"
    yield f"a step of DDP with PowerSGD takes {both[1]} times"
    for rows, title in cells_of_speedup():
        if title.startswith(("cnn", "resnet18")):
            hook, ours = hook_and_codec(rows)
            assert rows["DDP compute"]["step"] < rows["compute"]["step"]
            assert rows[hook]["step"] < rows[ours]["step"]
    assert all(
        rows["Pipe-SGD, PowerSGD"]["ratio_to_compute"]
        < rows[hook_and_codec(rows)[0]]["ratio_to_compute"]
        for rows in wide
    ), "in every cell of the wide MLP"
    small = [
        rows for rows, title in cells_of_speedup() if title.startswith("wide_mlp, 512")
    ]
    cores = _least_and_most(
        rows["Pipe-SGD, PowerSGD"]["step"] / rows["Pipe-SGD, PowerSGD"]["cores"]
        for rows in small
    )
    yield f"With PowerSGD, a step takes {cores} times as long as the cores work"
    gloo = _least_and_most(
        statistics.median(cell["measured"]["Pipe-SGD"]["communication"])
        / cell["rows"]["Pipe-SGD"]["wire"]
        for cell in result("speedup")["cells"]
        if cell["measured"]
    )
    yield f"Gloo's all-reduce alone takes {gloo} times"


def _least_and_most(ratios):
    ratios = list(ratios)
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def rows_of_overhead():
    """Yields a row for each model. Below 10 ms, the compiled programs are compared."""
    for case, found in result("overhead")["models"].items():
        names = ("width 1", "width 2, plain", "width 2, predicted")
        cells = [with_quartiles(judged(found, name)) for name in names]
        cells += map(with_quartiles, (found["by hand, checked"], found[_OPTAX]))
        ms = found["by hand"]["ms_per_step"]
        yield f"| {case} | {ms:.1f} | " + " | ".join(cells) + " |"


_OPTAX = "by hand, skipping"


def words_on_overhead():
    """Yields the largest ratio, and the processor."""
    record = result("overhead")
    names = ("width 1", "width 2, plain", "width 2, predicted")
    judged = [
        found[name]["judged"] for found in record["models"].values() for name in names
    ]
    yield f"at most {max(judged):.2f} times"
    cpu = record["cpu"]
    yield f"{cpu['cores']} cores of an {cpu['model']} with {cpu['vectors'].upper()}"
    python = record["python_microseconds"]["width 1"]["median"]
    yield f"takes {python:.0f} microseconds longer than its program"


def words_on_the_paper():
    """Yields how many times as fast Pipe-SGD is as the methods of the paper."""
    cells = [rows for rows, _ in cells_of_speedup()]
    best = [rows[hook_and_codec(rows)[1]]["faster_than"] for rows in cells]
    server, sync = (
        _least_and_most(ratios[other][1] for ratios in best)
        for other in ("PS-Sync", "D-Sync")
    )
    yield (
        f"{server} times as fast as a synchronous parameter server and {sync} times as"
        " fast as D-Sync, with the fastest codec"
    )
    yield lower_with_a_plain_delay()
    plain = _least_and_most(
        rows["Pipe-SGD"]["faster_than"]["D-Sync"][1] for rows in cells
    )
    yield f"Without a codec, Pipe-SGD is {plain} times as fast as D-Sync here"


def rows_of_compile_time():
    """Yields a row for each number of leaves: steps by hand, and ratios to them."""
    record = result("compile_time")
    for leaves, found in record["leaves"].items():
        cells = [
            f"{found[twin]['total']:.1f}"
            for twin in sorted({*record["twins"].values()})
        ]
        cells += [f"{found[name]['ratio']:.2f}" for name in record["twins"]]
        yield f"| {leaves} | " + " | ".join(cells) + " |"


def words_on_compile_time():
    """Yields the largest ratio, and the ratio for 800 leaves."""
    record = result("compile_time")
    ratios = [
        found[name]["ratio"]
        for found in record["leaves"].values()
        for name in record["twins"]
    ]
    yield f"at most {max(ratios):.2f} times as long to trace and compile"
    found = record["leaves"]["800"]
    yield f"{found['K=2, predicted']['to_the_shortest']:.1f} times as long"


def words_on_8_bits():
    """Yields the time that 8 bits save on MNIST, at the accuracy of all bits."""
    mnist = took("time_to_accuracy_mnist")
    yield f"in {mnist['Pipe-SGD, int8'] / mnist['D-Sync']:.2f} of D-Sync's time"


def shares_of_the_race():
    """Returns Pipe-SGD's time on CIFAR-10 over D-Sync's and DDP's, by codec."""
    seconds = took("time_to_accuracy_cifar10")
    rows = [seconds[name] for name in ("Pipe-SGD", "Pipe-SGD, int8")]
    return [[row / seconds[other] for other in ("D-Sync", "DDP")] for row in rows]


def words_on_the_race():
    """Yields Pipe-SGD's share of the others' time, and the cost of a plain delay."""
    all_bits, coded = shares_of_the_race()
    yield "in {:.2f} of the time of D-Sync and {:.2f} of the time of DDP".format(
        *all_bits
    )
    yield "With 8 bits it takes\n{:.2f} and {:.2f}".format(*coded)
    yield f"A {lower_with_a_plain_delay()}"


def lower_with_a_plain_delay():
    """Returns the points of accuracy that a plain delay costs on CIFAR-10."""
    accuracy = ends("time_to_accuracy_cifar10")
    lost = 100 * (accuracy["D-Sync"] - accuracy["Pipe-SGD, plain"])
    return f"plain delay ends {lost:.1f} points lower"


def caption_of_the_race():
    """Yields the caption in the README; accuracies are equal to half a point."""
    all_bits, coded = shares_of_the_race()
    yield f"in {all_bits[0]:.2f} of its time and {all_bits[1]:.2f} of DDP's"
    yield f"with 8-bit gradients in {coded[0]:.2f}"
    accuracy = ends("time_to_accuracy_cifar10")
    for name in ("Pipe-SGD", "Pipe-SGD, int8"):
        assert abs(accuracy[name] - accuracy["D-Sync"]) < 0.005


def words_on_power_sgd():
    """Yields the points of accuracy that PowerSGD costs on MNIST."""
    accuracy = ends("time_to_accuracy_mnist")
    ours, ddp = (
        100 * (accuracy["D-Sync"] - accuracy[f"{name}, PowerSGD"])
        for name in ("Pipe-SGD", "DDP")
    )
    yield f"costs Pipe-SGD {ours:.1f} points and DDP {ddp:.1f}"


def ends(name):
    """Returns the final accuracies by method, as means over seeds."""
    return of_methods(name, "accuracy")


def took(name):
    """Returns the total seconds by method, as means over seeds."""
    return of_methods(name, "seconds")


def of_methods(name, what):
    runs = list(result(name)["runs"].values())
    return {
        method: statistics.mean(run[method][what][-1] for run in runs)
        for method in runs[0]
    }


def rows_of_time_to_accuracy(race):
    return lines(time_to_accuracy.rows(result(f"time_to_accuracy_{race}")))


rows_of_cifar10 = functools.partial(rows_of_time_to_accuracy, "cifar10")


rows_of_mnist = functools.partial(rows_of_time_to_accuracy, "mnist")


@pytest.mark.parametrize(
    ("path", "rows"),
    [
        ("README.md", caption_of_the_race),
        ("README.md", rows_of_gain),
        ("docs/speed.md", rows_of_cifar10),
        ("docs/speed.md", words_on_the_race),
        ("docs/speed.md", rows_of_speedup),
        ("docs/speed.md", rows_of_gain),
        ("docs/speed.md", rows_of_limits),
        ("docs/speed.md", rows_of_measured),
        ("docs/speed.md", words_on_steps),
        ("docs/speed.md", rows_of_mnist),
        ("docs/speed.md", words_on_power_sgd),
        ("docs/compression.md", words_on_power_sgd),
        ("docs/speed.md", words_on_8_bits),
        ("docs/speed.md", rows_of_overhead),
        ("docs/speed.md", words_on_overhead),
        ("docs/paper.md", words_on_the_paper),
        ("docs/speed.md", rows_of_compile_time),
        ("docs/speed.md", words_on_compile_time),
    ],
)
def test_figures_equal_the_result_files(path, rows):
    assert_shown(path, rows())
