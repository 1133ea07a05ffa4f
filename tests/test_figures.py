"""Figures in README and docs are those of the result files."""

import functools
import json
import math
import pathlib
import statistics

import optax
import pytest

import pipejax as pj
from experiments import delay_robust, prediction, time_to_accuracy
from experiments.convergence import _show, sharpness
from experiments.convergence._change import change
from experiments.convex import __main__ as convex
from experiments.faults import __main__ as faults
from experiments.faults import endurance, start
from pipejax import codecs

ROOT = pathlib.Path(__file__).parents[1]


def result(name):
    return json.loads((ROOT / f"experiments/results/{name}.json").read_text())


def lines(rows):
    """Of a table in Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in rows]


def rows_of_starts():
    record = result("faults_start")
    return lines(start.rows(record["found"], record["hosts"]))


def rows_of_faults():
    return lines(faults.rows(result("faults")["outcomes"]))


def rows_of_endurance():
    return lines(endurance.rows(result("faults_endurance")["diaries"]))


def rows_of_convergence():
    return lines(_show.rows(result("convergence")))


def rows_of_ends():
    return lines(_show.ends(result("convergence")))


def words_on_convergence():
    """How often the default of K=2 and a plain delay end near synchronous training."""
    yield how_many_end_near(1.0)


def words_on_large_rates():
    """The same at twice the tuned rates."""
    yield how_many_end_near(2.0)


def how_many_end_near(factor):
    found = result("convergence")
    settings = list(_show.compared(found, factor))
    default, plain = (
        _show.count_near(found, name, settings)
        for name in ("K=2, predicted", "K=2, plain")
    )
    return f"in {default} cases, a plain delay in {plain.split()[0]}"


def words_on_what_is_given_back():
    """Of what a plain delay loses at the tuned rates, beyond the limits, at K=2."""
    found, shares = result("convergence"), {"muon": [], "others": []}
    for setting in _show.compared(found, 1.0):
        plain, default = (
            change(found, setting, name) for name in ("K=2, plain", "K=2, predicted")
        )
        if plain.nats and not plain.is_near:
            share = 1 - statistics.mean(default.nats) / statistics.mean(plain.nats)
            kind = setting[1] if setting[1] == "muon" else "others"
            shares[kind].append(math.floor(100 * share))
    cifar, text = shares["muon"]
    least = min(shares["others"])
    yield f"gives back {least} % of what it loses or more under momentum and AdamW"
    yield f"under Muon {cifar} % on CIFAR-10 and {text} % on the transformer"


def rows_of_counts():
    return lines(_show.counts(result("convergence")))


def rows_of_sharpness():
    found = result("convergence_sharpness")["runs"]
    return lines(sharpness.rows(found, result("convergence")))


def rows_of_delay_robust():
    return lines(delay_robust.rows(result("delay_robust")["test_loss"]))


def words_on_sharpness():
    """What the default lost below its limit, and beyond."""
    found, compared = result("convergence_sharpness")["runs"], result("convergence")
    below, beyond = [], []
    for setting, runs in sharpness.by_setting(found):
        for method in sharpness.SHOWN:
            share = sharpness.share(runs, method)
            group = below if share < 1 else beyond
            group.append((share, sharpness.cost(compared, setting, method)))
    most = math.ceil(1e3 * max(cost for _, cost in below)) / 1e3
    more = sum(cost > 0.01 for _, cost in beyond)
    some = [share for share, cost in below if cost > 0.01]
    assert min(some) > 0.9
    yield f"Of {len(below)} below the limit none lost more than {most} nats,"
    yield f"and {len(some)} lost more than 0.01, all above 0.9 of it;"
    yield f"of {len(beyond)} beyond it {more} lost more than 0.01."
    shares = [
        sharpness.share(runs, method)
        for _, runs in sharpness.by_setting(found)
        for method in ("K=2, plain", "K=3, plain")
    ]
    least = math.floor(10 * min(shares)) / 10
    yield f"every plain delay is beyond {least} times its limit"


def rows_of_overhead():
    record = result("overhead")
    for case, variants in record["models"].items():
        cells = []
        for name in ("width 1", "width 2", "by hand, skipping"):
            low, middle, high = variants[name]["ratio"].values()
            cells.append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
        yield (
            f"| {case} | {variants['by hand']['ms_per_step']:.1f} | "
            + " | ".join(cells)
            + " |"
        )


def rows_of_overlap():
    """On GPUs the least and greatest over targets; on TPUs one row each."""
    covered = {
        (cell["model"], cell["target"], cell["program"]): cell["covered"]
        for name in ("overlap", "overlap_tpu")
        for cell in result(name)["cells"]
    }
    models = list(dict.fromkeys(model for model, _, _ in covered))
    targets = list(dict.fromkeys(target for _, target, _ in covered))
    gpus = [target for target in targets if not target.startswith("tpu")]
    by_hand = ("D-Sync", "D-Sync by hand", "D-Sync by hand, defaults")
    programs = [("pipelined",), ("two-shot",), by_hand]
    programs += [("naive, defaults",), ("negative control",)]
    for model in models:
        cells = []
        for best_of in programs:
            values = [max(covered[model, gpu, p] for p in best_of) for gpu in gpus]
            cells.append(f"{min(values):.2f} - {max(values):.2f}")
        yield f"| {model} | " + " | ".join(cells) + " |"
    for target in targets:
        if target not in gpus:
            values = [covered[model, target, "pipelined"] for model in models]
            yield f"| {target} | " + " | ".join(f"{x:.2f}" for x in values) + " |"


def rows_of_wire():
    record = result("wire")
    assert all(row["same"] for row in record["rows"])
    ratios = {(x["algorithm"], x["codec"]): x["ratio"] for x in record["rows"]}
    algorithms = list(dict.fromkeys(algorithm for algorithm, _ in ratios))
    yield "| codec | " + " | ".join(algorithms) + " |"
    for codec in ("none", *codecs.NAMES):
        found = [ratios.get((algorithm, codec)) for algorithm in algorithms]
        cells = ["" if ratio is None else f"{ratio:.3f}" for ratio in found]
        yield f"| {codec} | " + " | ".join(cells) + " |"


def rows_of_codecs():
    rows = result("codecs")["codecs"]
    most = rows["none"]["bytes_sent"]
    for name, row in rows.items():
        cells = [f"{row['bytes_sent']:,.0f}", f"{row['bytes_sent'] / most:.3f}"]
        for width in ("width 1", "width 2"):
            values = [100 * x for x in row[width]]
            low, high = min(values), max(values)
            cells.append(f"{statistics.mean(values):.1f} ({low:.1f} - {high:.1f})")
        yield f"| {name} | " + " | ".join(cells) + " |"


def rows_of_levels():
    for name, row in result("levels")["rows"].items():
        between, inside = row["bytes_between_hosts"], row["bytes_inside"]
        yield (
            f"| {name} | {row['error']:.4f} | {between / 1e3:.0f} | {inside / 1e3:.0f}"
            f" | {1e6 * row['seconds']:.0f} |"
        )


def rows_of_codec_speed():
    pages = result("codec_speed")["pages"]
    names = [n.removesuffix(", both") for n in pages["huge pages"] if "both" in n]
    for name in names:
        cells = [
            f"{rows[f'{name}, {way}']['speed of the copy']:.2f}"
            for rows in pages.values()
            for way in ("encode", "decode", "both")
        ]
        yield f"| {name} | " + " | ".join(cells) + " |"


def rows_of_allreduce_profile():
    """Of four hosts by phase; then as one program over its bytes' time, by hosts."""
    cells = {
        (c["hosts"], c["devices"]): c for c in result("allreduce_profile")["cells"]
    }
    for place in ((4, 1), (4, 2)):
        for name, row in cells[place]["rows"].items():
            seconds = [*row["phases"].values(), row["as_one_program"], row["wire"]]
            numbers = (f"{1e3 * x:.0f}" for x in seconds)
            yield f"| {name}{' *' * (place == (4, 2))} | " + " | ".join(numbers) + " |"
    for name in cells[4, 1]["rows"]:
        found = [cells[hosts, 1]["rows"][name] for hosts in (2, 4, 8)]
        times = [(row["as_one_program"], row["wire"]) for row in found]
        numbers = (f"{1e3 * x:.0f} | {x / wire:.2f}" for x, wire in times)
        yield f"| {name} | " + " | ".join(numbers) + " |"


def words_on_the_profile():
    cells = {
        (c["hosts"], c["devices"]): c["rows"]
        for c in result("allreduce_profile")["cells"]
    }
    server, psum = (
        cells[8, 1][name]["as_one_program"]
        for name in ("parameter_server, none", "psum, none")
    )
    yield f"with eight hosts it takes {server / psum:.1f} times as long"
    pairs = [cells[2, 1][f"{name}, none"] for name in ("ring", "two_shot")]
    pairs += [cells[hosts, 1]["halving_doubling, none"] for hosts in (2, 4, 8)]
    times = [row["as_one_program"] / row["wire"] for row in pairs]
    yield f"come to {min(times):.1f} to {max(times):.1f} times the wire"
    ring = cells[4, 1]["ring, int8"]
    phases = ring["phases"]
    cores = sum(phases[name] for name in ("encode", "reduction", "decode"))
    shares = (x / ring["as_one_program"] for x in (cores, phases["launch"]))
    yield "are {:.0%} of the int8 ring on four hosts, launches {:.0%}".format(
        *shares
    ).replace("%", " %")


def rows_of_prediction():
    cells = result("prediction")["cells"]
    yield from lines(prediction.rows(cells)[1:])
    off = [
        (cell["hosts"], "sign" in title)
        for cell in cells
        for title, row in cell["rows"].items()
        if abs(prediction.error(row)) > 0.25
    ]
    pairs = off.count((2, False))
    signs = sum(sign for _, sign in off)
    count = sum(len(cell["rows"]) for cell in cells)
    yield f"{len(off)} of {count} are off by more than 25 %"
    yield f"{pairs} of these"
    yield f"{signs} are of `sign`"
    yield f"the other {len(off) - pairs - signs} "


def rows_of_speedup():
    """A row a model and rate: milliseconds a step; the best against others."""
    for cell in result("speedup")["cells"]:
        found, problem = cell["rows"], cell["problem"]

        def best(start, found=found):
            names = [name for name in found if name.startswith(start)]
            return min(names, key=lambda name: found[name]["step"])

        hook, ours = best("DDP, "), best("Pipe-SGD")
        steps = [found["compute"]["step"], found["DDP compute"]["step"]]
        steps += [found["D-Sync"]["wire"]]
        names = ("PS-Sync", "D-Sync", "DDP", hook, "Pipe-SGD", ours)
        steps += [found[name]["step"] for name in names]
        cells = [f"{1e3 * x:,.0f}" for x in steps]
        cells[6] += f" ({hook.removeprefix('DDP, ')})"
        cells[8] += f" ({ours.removeprefix('Pipe-SGD, ')})"
        for other in ("PS-Sync", "D-Sync", hook):
            low, middle, high = found[ours]["faster_than"][other]
            cells.append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
        title = f"{problem['model']}, {problem['batch_size']}, {cell['rate']}"
        yield f"| {title} | " + " | ".join(cells) + " |"


HEAVY_BALL = functools.partial(optax.sgd, momentum=0.9)
STABILITY = {
    "SGD": lambda width: optax.sgd,
    "heavy-ball, 0.5": lambda width: functools.partial(optax.sgd, momentum=0.5),
    "heavy-ball, 0.9": lambda width: HEAVY_BALL,
    "Nesterov, 0.9": lambda width: functools.partial(HEAVY_BALL, nesterov=True),
    "`extrapolate_updates`": lambda width: (
        lambda rate: optax.chain(
            HEAVY_BALL(rate), pj.corrections.extrapolate_updates(width - 1)
        )
    ),
    "`average_gradients`": lambda width: (
        lambda rate: optax.chain(
            pj.corrections.average_gradients(width), HEAVY_BALL(rate)
        )
    ),
    "`delay_robust`": lambda width: (
        lambda rate: optax.chain(
            HEAVY_BALL(rate), pj.corrections.delay_robust(0.9, width)
        )
    ),
}


def rows_of_stability():
    predicted = [name for name in STABILITY if not name.startswith("`")]
    cases = [
        *((name, name, {"weight_prediction": False}) for name in STABILITY),
        *((f"{name}, predicted", name, {}) for name in predicted),
        ("heavy-ball, 0.9, fed back", "heavy-ball, 0.9", {"deviation_feedback": 0.5}),
    ]
    for title, name, how in cases:
        limits = [
            pj.stability.max_learning_rate(STABILITY[name](width), width, **how)
            for width in (1, 2, 3, 4)
        ]
        yield f"| {title} | " + " | ".join(f"{x:.3g}" for x in limits) + " |"


def rows_of_convex():
    found = result("convex")
    for rows in (
        convex.regret_rows(found)[1:],
        convex.width_rows(found["codecs"], "codec")[1:],
    ):
        yield from lines(rows)


def words_on_steps():
    """Where compute and wire are nearest to each other; and of 8 bits the most."""
    cells = [cell["rows"] for cell in result("speedup")["cells"]]

    def alone(rows):
        """What hiding gains at its best."""
        both = rows["compute"]["step"], rows["D-Sync"]["wire"]
        return sum(both) / max(both)

    even = max(cells, key=alone)
    over = {name: x[1] for name, x in even["Pipe-SGD"]["faster_than"].items()}
    yield f"{over['D-Sync']:.2f} times as fast\nas D-Sync and {over['DDP']:.2f} times"
    yield f"of {alone(even):.2f} that can be"
    coded = [rows["Pipe-SGD, int8"]["faster_than"] for rows in cells]
    server, ring = (max(x[name][1] for x in coded) for name in ("PS-Sync", "D-Sync"))
    yield (
        f"{server:.1f} times as fast as PS-Sync and {ring:.1f} times as fast as D-Sync"
    )


def words_on_8_bits():
    """What 8 bits, at the accuracy of all bits, gain on MNIST and where most."""
    mnist = took("time_to_accuracy_mnist")
    yield f"in {mnist['Pipe-SGD, int8'] / mnist['D-Sync']:.2f} of D-Sync's time"
    for cell in result("speedup")["cells"]:
        problem, rows = cell["problem"], cell["rows"]
        model = problem["model"], problem["batch_size"], cell["rate"]
        if model == ("wide_mlp", 512, "100mbit"):
            faster = rows["Pipe-SGD, int8"]["faster_than"]
            server, ring = (faster[name][1] for name in ("PS-Sync", "D-Sync"))
            yield (
                f"{server:.1f} times as fast as PS-Sync and {ring:.1f} times as fast as"
                " D-Sync"
            )


def words_on_the_race():
    """Of CIFAR-10: what Pipe-SGD takes of others' time, what a plain delay costs."""
    race = "time_to_accuracy_cifar10"
    seconds, accuracy = took(race), ends(race)
    rows = [seconds[name] for name in ("Pipe-SGD", "Pipe-SGD, int8")]
    all_bits, coded = ([row / seconds[n] for n in ("D-Sync", "DDP")] for row in rows)
    yield "in {:.2f} of the time of the one and {:.2f} of the other".format(*all_bits)
    yield "with 8 bits likewise, in {:.2f} and {:.2f}".format(*coded)
    lost = 100 * (accuracy["D-Sync"] - accuracy["Pipe-SGD, plain"])
    yield f"A plain delay ends {lost:.1f} points below"


def words_on_power_sgd():
    """What it costs on MNIST."""
    accuracy = ends("time_to_accuracy_mnist")
    ours, ddp = (
        100 * (accuracy["D-Sync"] - accuracy[f"{name}, PowerSGD"])
        for name in ("Pipe-SGD", "DDP")
    )
    yield f"costs Pipe-SGD {ours:.1f} points and DDP {ddp:.1f}"


def ends(name):
    """Final accuracies, means over seeds, by method."""
    return of_methods(name, "accuracy")


def took(name):
    """Seconds in all, means over seeds, by method."""
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
        ("README.md", rows_of_cifar10),
        ("README.md", words_on_the_race),
        ("README.md", rows_of_speedup),
        ("README.md", words_on_steps),
        ("docs/speed.md", rows_of_mnist),
        ("docs/speed.md", words_on_power_sgd),
        ("docs/speed.md", words_on_8_bits),
        ("docs/speed.md", rows_of_overhead),
        ("docs/overlap.md", rows_of_overlap),
        ("README.md", words_on_convergence),
        ("docs/convergence.md", words_on_convergence),
        ("docs/convergence.md", words_on_what_is_given_back),
        ("docs/convergence.md", rows_of_convergence),
        ("docs/convergence.md", rows_of_ends),
        ("docs/convergence.md", words_on_large_rates),
        ("docs/convergence.md", rows_of_counts),
        ("docs/many_hosts.md", rows_of_starts),
        ("docs/many_hosts.md", rows_of_faults),
        ("docs/many_hosts.md", rows_of_endurance),
        ("docs/compression.md", rows_of_wire),
        ("docs/compression.md", rows_of_codecs),
        ("docs/compression.md", rows_of_levels),
        ("docs/compression.md", rows_of_codec_speed),
        ("docs/timing.md", rows_of_allreduce_profile),
        ("docs/timing.md", words_on_the_profile),
        ("docs/timing.md", rows_of_prediction),
        ("docs/convergence.md", rows_of_stability),
        ("docs/convergence.md", rows_of_sharpness),
        ("docs/convergence.md", words_on_sharpness),
        ("docs/convergence.md", rows_of_delay_robust),
        ("docs/convergence.md", rows_of_convex),
    ],
)
def test_figures_are_those_of_the_result_files(path, rows):
    text = (ROOT / path).read_text()
    for row in rows():
        assert row in text


def test_convex_delays_are_gone_in_the_end():
    """The document's 3 % of smooth losses, and 2 % of softmax regression."""
    found = result("convex")
    bounds = [(found["smooth"], 0.03)]
    bounds += [(rows, 0.02) for rows in found["softmax"].values()]
    for rows, bound in bounds:
        assert all(abs(row[-1] / rows["1"][-1] - 1) < bound for row in rows.values())
