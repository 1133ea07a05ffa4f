"""Measures test accuracy against wall-clock time, on four hosts with real TCP.

Bar: Pipe-SGD with 8 bits ends within 0.3 points of the accuracy of synchronous
training, and reaches any accuracy on the way sooner than D-Sync, a parameter server and
DDP of PyTorch do. There are three seeds.

The races are an MLP on MNIST, and a small CNN on CIFAR-10, which is re-encoded as JPEG.
The demo has another race: an MLP on the digits of scikit-learn, on two hosts whose
exchange takes longer than their compute. All methods train with AdamW, for the same
number of steps, on the same batches. The learning rate falls to 0 along a cosine.

Pipe-SGD is the train step with its defaults, including weight prediction. *Plain* is
Pipe-SGD without weight prediction, as in the paper. For both, the first tenth of the
steps is synchronous, as in the paper.

Parameters are copied at even intervals, and tested when the run is over, so that the
clock measures nothing but training. The copies are those of the worker on the first
host. With PS-Async, this worker sits beside the server and is done first. So only the
last copy counts, which is taken when all workers are done.

Command: python -m experiments.time_to_accuracy [--race cifar10]
         --data-dir ~/tensorflow_datasets
         A run that was broken off goes on with the seeds that its result lacks.
Time: on 2 cores 35 to 50 minutes, of CIFAR-10 one to two hours.
Result: experiments/results/time_to_accuracy_mnist.json and _cifar10.json,
        docs/time_to_accuracy_mnist.png and _cifar10.png
"""

import dataclasses
import itertools
import json
import pathlib
import statistics
import time
from typing import IO, Any, Literal

import jax
import numpy as np
import tyro

from pipejax._internal.figures import new_figure

from . import cluster, data, methods, report, task
from .cluster import member
from .methods import Problem

OURS = ("Pipe-SGD", "Pipe-SGD, plain", "Pipe-SGD, int8")
METHODS = ("PS-Sync", "PS-Async", "D-Sync", *OURS, "DDP")
ASYNC = "PS-Async"  # whose copies on the way are not those of all workers
CODED = ("D-Sync, int8", "Pipe-SGD, truncate", "Pipe-SGD, PowerSGD", "DDP, PowerSGD")


@dataclasses.dataclass(frozen=True)
class Race:
    """A data set, a model and a network."""

    problem: Problem
    """The model, the batch of each host, and the optimizer."""
    data: str
    """Name of the data set: digits, or a TFDS name."""
    steps: int
    """Number of steps of each method."""
    methods: tuple[str, ...]
    """Methods that take part, by their names in `experiments.methods`."""
    glance: int
    """Number of images of each test on the way. The last test has all images."""
    rate: str = "500mbit"
    """Rate of the link of each host, in each direction."""


RACES = {
    "mnist": Race(Problem("mlp", 64), "mnist", 1600, METHODS + CODED, glance=10_000),
    "cifar10": Race(Problem("cnn", 16), "cifar10_jpeg", 1200, METHODS, glance=2_500),
    "digits": Race(
        Problem("wide_mlp", 128, 3e-4, images="digits"),
        "digits",
        60,
        ("compute", "D-Sync", "Pipe-SGD", "Pipe-SGD, int8"),
        glance=500,
        rate="1gbit",
    ),
}
_BATCH = 500  # images that are tested at once


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the race."""

    race: Literal["mnist", "cifar10", "digits"] = "mnist"
    """Race to run."""
    methods: tuple[str, ...] | None = None
    """Methods to train with. By default, those of the race."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the parameters and of the order of the data."""
    data_dir: pathlib.Path | None = None
    """Folder of TFDS data sets. By default $TFDS_DATA_DIR, or ~/tensorflow_datasets."""
    tests: int = 25
    """Least number of tests in a run. The last one is at its end."""
    steps: int | None = None
    """Number of steps of each method. By default, that of the race."""
    hosts: int = 4
    """Number of hosts to emulate."""
    on_host: bool = False
    """Train on this host of a cluster: the program calls itself with this flag."""
    out: pathlib.Path | None = None
    """File to write the result to, as JSON. By default, it is named after the race."""
    plot: pathlib.Path | None = None
    """File to write the picture to, as PNG. By default, it is in docs."""
    redraw: bool = False
    """Draw the picture of an existing result, and run nothing."""


def main(config: Config) -> None:
    """Runs one seed after another; prints tables, writes the result, and draws."""
    if config.on_host:
        run(config)
        return
    jax.config.update("jax_platforms", "cpu")
    name = f"time_to_accuracy_{config.race}"
    out = config.out or report.RESULTS / f"{name}.json"
    plot = config.plot or pathlib.Path(f"docs/{name}.png")
    if config.redraw:
        picture(json.loads(out.read_text()), plot)
        return
    settings = {
        "hosts": config.hosts,
        "seeds": list(config.seeds),
        "tests": config.tests,
        **dataclasses.asdict(race_of(config)),
    }
    runs = begun(out, settings)
    race = {**settings, "runs": runs}
    for seed in config.seeds:
        runs[str(seed)] = runs.get(str(seed)) or on_hosts(config, seed)
        report.save(out, seed=config.seeds[0], **race)
        show(race)
    picture(race, plot)


def race_of(config: Config) -> Race:
    """Returns the race with the changes of the command line."""
    race = RACES[config.race]
    steps = config.steps or race.steps
    problem = dataclasses.replace(race.problem, steps=steps, warmup=steps // 10)
    methods = config.methods or race.methods
    return dataclasses.replace(race, problem=problem, steps=steps, methods=methods)


def begun(out: pathlib.Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the runs of an interrupted result with this commit and these settings."""
    commit = report.commit()
    if not out.exists() or commit.endswith("-dirty"):
        return {}
    found = json.loads(out.read_text())
    same = {"commit": commit, **json.loads(json.dumps(settings))}
    return found["runs"] if same.items() <= found.items() else {}


def on_hosts(config: Config, seed: int, log: IO[str] | None = None) -> Any:
    """Runs all methods with one seed on a cluster, whose hosts print to `log`."""
    race = race_of(config)
    flags = [
        *("--on-host", "--race", config.race, "--seeds", str(seed)),
        *("--tests", str(config.tests), "--steps", str(race.steps)),
        *("--methods", *race.methods),
        *(() if config.data_dir is None else ("--data-dir", str(config.data_dir))),
    ]
    network = cluster.Network.of(config.hosts, (race.rate,))
    return cluster.ask(network, "experiments.time_to_accuracy", flags, log)


def run(config: Config) -> None:
    """Trains with every method in turn; the first host tests the copies it has made."""
    race, (seed,) = race_of(config), config.seeds
    problem = dataclasses.replace(race.problem, seed=seed)
    rank = member.join()
    dataset = data.load(race.data, data_dir=config.data_dir)
    test = task.make_test(problem.net)
    size = min(_BATCH, len(dataset.test))
    images = list(data.test_batches(dataset, batch_size=size)) if rank == 0 else []
    some = images[: race.glance // _BATCH]
    figures: dict[str, Any] = {}
    for name in race.methods:
        try:
            method = methods.make(name, problem)
        except methods.NotInstalledError as error:
            figures[name] = {"missing": str(error)}
            continue
        before = member.wire()
        steps, seconds, copies = trained(method, race, seed, dataset, config.tests)
        # A pipeline begins with an exchange of zeros for each step of delay.
        exchanges = race.steps + method.width - 1
        sent = max(member.wire().since(before)) / exchanges
        (wire_bytes,) = member.largest([sent])
        method.close()
        if rank == 0:
            accuracy = [test(params, some)["test_accuracy"] for params in copies[:-1]]
            accuracy.append(test(copies[-1], images)["test_accuracy"])
            figures[name] = {
                "steps": steps,
                "seconds": seconds,
                "accuracy": accuracy,
                "wire_bytes": wire_bytes,
            }
        member.barrier()  # the other hosts wait while the first one tests
    if rank == 0:
        member.answer(figures, config.out)


def trained(
    method: methods.Method, race: Race, seed: int, dataset: data.Dataset, tests: int
) -> tuple[list[int], list[float], list[Any]]:
    """Trains once, and copies the parameters at even intervals.

    Returns:
      The steps of the copies, the seconds of training before each copy, and the copies.
    """
    batches = data.train_batches(
        dataset,
        batch_size=race.problem.batch_size * jax.process_count(),
        seed=seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    every = max(1, race.steps // tests)
    steps, seconds, copies = [], [], []
    member.barrier()
    start = None
    for step in range(1, race.steps + 1):
        method.step(next(batches))
        if start is None:  # the clock starts after compilation
            method.wait()
            start = time.perf_counter()
        if step == race.steps:
            method.finish()
            member.barrier()  # for PS-Async, where no worker waits for another
        if step % every == 0 or step == race.steps:
            steps.append(step)
            copies.append(jax.device_get(method.params()))
            seconds.append(time.perf_counter() - start)
    return steps, seconds, copies


def rows(race: dict[str, Any]) -> list[list[str]]:
    """Returns the table: a row of titles, then a row for each method.

    A row has the final accuracy, all seconds, and the seconds to the goal. The goal is
    99.5 % of the mean final accuracy of the worst method.
    """
    runs = list(race["runs"].values())
    names = [name for name, row in runs[0].items() if "seconds" in row]
    finals = {n: [run[n]["accuracy"][-1] for run in runs] for n in names}
    goal = 0.995 * min(map(statistics.mean, finals.values()))
    titles = ["", "final accuracy", "least", "greatest", "seconds in all"]
    table = [[*titles, f"seconds to {goal:.1%}"]]
    for name in names:
        took = [when for run in runs if (when := first(run[name], goal)) is not None]
        accuracies = (statistics.mean, min, max)
        table.append(
            [
                name,
                *(f"{of(finals[name]):.1%}" for of in accuracies),
                f"{statistics.mean(run[name]['seconds'][-1] for run in runs):.0f}",
                "-"
                if name == ASYNC or len(took) < len(runs)
                else f"{statistics.mean(took):.0f}",
            ]
        )
    return table


def show(race: dict[str, Any]) -> None:
    """Prints the table of the seeds that have been run so far."""
    title = f"{race['data']}, {race['rate']}, {len(race['runs'])} seeds"
    report.console(width=110).print(report.table(title, rows(race)))


def first(row: dict[str, Any], goal: float) -> float | None:
    """Returns the seconds after which the test accuracy first is `goal` or higher."""
    for seconds, accuracy in zip(row["seconds"], row["accuracy"], strict=True):
        if accuracy >= goal:
            return seconds
    return None


def picture(race: dict[str, Any], path: pathlib.Path) -> None:
    """Draws test accuracy over seconds: the mean over seeds, and a band for all."""
    from matplotlib.ticker import LogLocator

    figure = new_figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.add_subplot()
    runs = list(race["runs"].values())
    names = [name for name, row in runs[0].items() if "seconds" in row]
    ends = {}
    others = itertools.cycle(("tab:purple", "tab:brown", "tab:pink", "black"))
    for name in names:
        seconds, accuracies = over_seconds([run[name] for run in runs])
        mean = accuracies.mean(axis=0)
        color = DRAWN.get(name) or next(others)
        if name != ASYNC:
            axes.plot(seconds, mean, color=color, linewidth=2)
            axes.fill_between(
                seconds, *_bounds(accuracies), color=color, alpha=0.2, linewidth=0
            )
        ends[name] = float(seconds[-1]), float(mean[-1]), color
    lowest, highest = (f(y for _, y, _ in ends.values()) for f in (min, max))
    last = [x for x, _, _ in ends.values()]
    # Where one method takes several times as long as another, a linear axis would have
    # most of them in a corner.
    apart = max(last) > FAR * min(last)
    bottom = (0.94 if apart else 0.85) * lowest
    top = highest + 0.1 * (highest - bottom)
    title = data.TITLES.get(race["data"], race["data"])
    axes.set(
        xscale="log" if apart else "linear",
        xlim=(min(last) / 20 if apart else 0, 1.02 * max(last)),
        ylim=(bottom, top),
        xlabel=f"seconds of training: {title}, {race['hosts']} emulated hosts,"
        f" {cluster.shown_rate(race['rate'])} links, mean and range of {len(runs)}"
        " seeds",
        ylabel="test accuracy",
    )
    for name, (x, y, color) in sorted(ends.items(), key=lambda end: end[1][0]):
        axes.plot(x, y, "o", color=color, label=name)
    figure.legend(loc="outside right center", title="the quickest first")
    if apart:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


FAR = 5  # how many times as long the slowest method takes where the axis is logarithmic
# Colors of the methods in the picture of the README.
DRAWN = {
    "PS-Sync": "tab:gray",
    "PS-Async": "tab:olive",
    "D-Sync": "tab:red",
    "DDP": "tab:orange",
    "Pipe-SGD": "tab:blue",
    "Pipe-SGD, plain": "tab:cyan",
    "Pipe-SGD, int8": "tab:green",
}


def over_seconds(rows: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Interpolates the accuracies of several seeds linearly at common seconds.

    Returns:
      Evenly spaced seconds [n], from the latest first test of all seeds to the mean of
      their ends, and accuracies [seeds, n].
    """
    start = max(row["seconds"][0] for row in rows)
    end = statistics.mean(row["seconds"][-1] for row in rows)
    seconds = np.linspace(start, end, 200)
    lines = [np.interp(seconds, row["seconds"], row["accuracy"]) for row in rows]
    return seconds, np.array(lines)


def _bounds(accuracies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return accuracies.min(axis=0), accuracies.max(axis=0)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
