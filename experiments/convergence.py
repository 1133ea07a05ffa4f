"""How a delay changes what is learned, and what corrects it.

Claim: with `weight_prediction`, a pipeline of width 2 ends where synchronous training
does, for SGD with momentum, AdamW and Muon, the learning rate tuned for synchronous
training and then left alone; also at twice that, where synchronous training still
learns. A plain delay does not.

Three tasks (`experiments.learning`), four virtual devices, the real train step, equal
steps, the same batches, no synchronous warm-up. First the learning rate: that of the
sweep, a factor 2 apart, whose synchronous run of the first seed ends with the least
test loss. Then every method at it; a plain delay and the default also at twice that.

Command: python -m experiments.convergence --text tinyshakespeare.txt
         A run that was broken off goes on where it was.
Time: on 2 cores eight hours, nearly half of it Muon's.
Result: experiments/results/convergence.json, docs/convergence.png
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
import tyro
from rich.console import Console

import pipejax as pj
from pipejax import corrections
from pipejax.picture import new_figure

from . import data, learning, report

Run = dict[str, Any]


def octaves(least: float, count: int) -> tuple[float, ...]:
    """Each twice the one before."""
    return tuple(least * 2**i for i in range(count))


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """What a user would have tuned."""

    make: Callable[[optax.Schedule], optax.GradientTransformation]
    """From a learning rate."""
    momentum: float
    """Decay of its average of gradients."""
    rates: tuple[float, ...]
    """The sweep."""


OPTIMIZERS = {
    "momentum": Optimizer(
        functools.partial(optax.sgd, momentum=0.9), 0.9, octaves(0.0125, 6)
    ),
    "adamw": Optimizer(optax.adamw, 0.9, octaves(0.0005, 5)),
    # Updates as large as AdamW's (Liu et al. 2025, https://arxiv.org/abs/2502.16982).
    "muon": Optimizer(
        functools.partial(optax.contrib.muon, consistent_rms=0.2),
        0.95,
        octaves(0.0005, 6),
    ),
}


@dataclasses.dataclass(frozen=True)
class Method:
    """A pipeline of some width, and how its delay is corrected."""

    width: int
    """Of the pipeline."""
    weight_prediction: bool = False
    """Of `pj.make_train_step`."""
    before: Callable[[float], optax.GradientTransformation] | None = None
    """From the optimizer's momentum to what the gradient goes through first."""
    after: Callable[[float], optax.GradientTransformation] | None = None
    """To what the optimizer's update goes through."""
    extrapolates: bool = False
    """Whether `after` leaves the parameters ahead of those to be tested."""

    def corrected(
        self, optimizer: Optimizer, rate: optax.Schedule
    ) -> optax.GradientTransformation:
        """The optimizer with its correction."""
        made = [
            correction(optimizer.momentum) if correction else optax.identity()
            for correction in (self.before, self.after)
        ]
        return optax.chain(made[0], optimizer.make(rate), made[1])


def predictions_of(width: int) -> dict[str, Method]:
    """What does best against a delay, and a plain one."""
    return {
        "": Method(width),
        ", own gradients": Method(width, weight_prediction=True),
        ", last update": Method(
            width,
            after=lambda _: corrections.extrapolate_updates(width - 1),
            extrapolates=True,
        ),
        ", robust": Method(
            width, after=lambda momentum: corrections.delay_robust(momentum, width)
        ),
    }


def others_of(width: int) -> dict[str, Method]:
    """What else there is."""
    return {
        ", average": Method(
            width, before=lambda _: corrections.average_gradients(width)
        ),
        ", scaled": Method(
            width, after=lambda _: corrections.scale_by_staleness(width)
        ),
        ", DC-ASGD": Method(
            width, before=lambda _: corrections.delay_compensation(width)
        ),
    }


METHODS = {
    "K=1": Method(1),
    **{f"K=2{name}": method for name, method in predictions_of(2).items()},
    **{f"K=2{name}": method for name, method in others_of(2).items()},
    **{f"K=3{name}": method for name, method in predictions_of(3).items()},
}
# At twice the tuned rate: plain, and the default.
TWICE = ("K=1", "K=2", "K=2, own gradients", "K=3", "K=3, own gradients")
DRAWN = ("K=1", "K=2", "K=2, own gradients", "K=3, own gradients", "K=2, robust")
TASKS = ("mnist", "cifar10", "shakespeare")


@dataclasses.dataclass(frozen=True)
class Config:
    """What is run."""

    tasks: tuple[str, ...] = TASKS
    """Of `experiments.learning`."""
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    """Which."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Which, besides synchronous training."""
    factors: tuple[float, ...] = (1.0, 2.0)
    """Times the tuned learning rate."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of parameters and batches."""
    steps: int | None = None
    """Of every run; by default the task's own."""
    data_dir: pathlib.Path | None = None
    """Where TFDS data sets lie; by default TFDS's own folder."""
    text: pathlib.Path = pathlib.Path("tinyshakespeare.txt")
    """What the transformer reads."""
    cpu_devices: int = 4
    """Virtual devices."""
    out: pathlib.Path = report.RESULTS / "convergence.json"
    """Where the result goes, and what was there is taken up."""
    plot: pathlib.Path = pathlib.Path("docs/convergence.png")
    """Where the picture goes."""


def main(config: Config) -> dict[str, Any]:
    """Runs what is not there yet; prints the table, draws."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    result = run_all(config)
    Console(width=120).print(report.table("test loss, accuracy", rows(result)))
    picture(result, config.plot)
    return result


def run_all(config: Config) -> dict[str, Any]:
    """Runs what is not there yet, writing each run down."""
    runs = begun(config)
    for name in config.tasks:
        task = make_task(name, config)
        for optimizer in config.optimizers:
            for run in itertools.chain(
                sweep(name, optimizer, config), grid(name, optimizer, config, runs)
            ):
                if found(runs, run) is None:
                    runs.append(run | train(task, run, config.cpu_devices))
                    record(config, runs)
    return record(config, runs)


def make_task(name: str, config: Config) -> learning.Task:
    """A task by name."""
    if name == "shakespeare":
        task = learning.characters(config.text, batch_size=16, steps=2000)
    elif name == "cifar10":
        dataset = data.load("cifar10_jpeg", data_dir=config.data_dir)
        task = learning.classifier("cnn", dataset, batch_size=64, steps=1500)
    else:
        dataset = data.load(name, data_dir=config.data_dir)
        task = learning.classifier("mlp", dataset, batch_size=256, steps=1500)
    return dataclasses.replace(task, steps=config.steps or task.steps)


def sweep(task: str, optimizer: str, config: Config) -> Iterator[Run]:
    """The runs that tune the learning rate."""
    for rate in OPTIMIZERS[optimizer].rates:
        yield key(task, optimizer, rate, "K=1", config.seeds[0])


def grid(task: str, optimizer: str, config: Config, runs: list[Run]) -> Iterator[Run]:
    """The runs that are compared."""
    tuned = tuned_rate(task, optimizer, config.seeds[0], runs)
    methods = ("K=1", *(name for name in config.methods if name != "K=1"))
    for factor, name, seed in itertools.product(config.factors, methods, config.seeds):
        if factor == 1 or name in TWICE:
            yield key(task, optimizer, factor * tuned, name, seed)


def tuned_rate(task: str, optimizer: str, seed: int, runs: list[Run]) -> float:
    """The rate of the least synchronous test loss."""
    swept = [
        run
        for rate in OPTIMIZERS[optimizer].rates
        if (run := found(runs, key(task, optimizer, rate, "K=1", seed)))
    ]
    return min(swept, key=lambda run: run["test_loss"] or math.inf)["rate"]


def key(task: str, optimizer: str, rate: float, method: str, seed: int) -> Run:
    """What tells a run from others."""
    return {
        "task": task,
        "optimizer": optimizer,
        "rate": rate,
        "method": method,
        "seed": seed,
    }


def found(runs: list[Run], wanted: Run) -> Run | None:
    """The run that is wanted, if it has been."""
    return next((run for run in runs if wanted.items() <= run.items()), None)


def train(task: learning.Task, run: Run, devices: int) -> Run:
    """How a run ends, and its training loss on the way."""
    how, seed = METHODS[run["method"]], run["seed"]
    tx = how.corrected(OPTIMIZERS[run["optimizer"]], task.schedule(run["rate"]))
    step = pj.make_train_step(
        task.loss,
        tx,
        mesh=pj.data_mesh(devices),
        width=how.width,
        weight_prediction=how.weight_prediction,
        executor="fused",
    )
    state = step.init(task.init(seed))
    losses = []
    for _, batch in zip(range(task.steps), task.batches(seed), strict=False):
        state, info = step.step(state, batch)
        losses.append(info.loss)
    state = step.drain(state)
    params = state.params
    if how.extrapolates:
        params = corrections.unextrapolated(state.opt_state, params)
    reported = np.array(losses)[how.width - 1 :]  # before, nothing has arrived
    means = [float(np.mean(part)) for part in np.array_split(reported, 25)]
    end = {**task.test(jax.device_get(params)), "skipped": int(state.skipped)}
    print(run, end, flush=True)
    return {
        **{name: finite(value) for name, value in end.items()},
        "losses": [finite(loss) for loss in means],
        "commit": report.commit(),
    }


def finite(value: float) -> float | None:
    """None for what is not: JSON has no NaN."""
    return value if math.isfinite(value) else None


def begun(config: Config) -> list[Run]:
    """The runs of a result that was broken off; each knows its commit."""
    if not config.out.exists():
        return []
    before, now = json.loads(config.out.read_text()), settings(config)
    if not now.items() <= before.items():
        raise ValueError(
            f"{config.out} has runs of other settings than {now}: give another --out,"
            " or remove it"
        )
    return before["runs"]


def settings(config: Config) -> dict[str, Any]:
    """What all runs of a result have in common."""
    return {"cpu_devices": config.cpu_devices, "steps": config.steps}


def record(config: Config, runs: list[Run]) -> dict[str, Any]:
    """Writes down what has been run."""
    result = {
        **settings(config),
        "factors": list(config.factors),
        "seeds": list(config.seeds),
        "runs": runs,
    }
    report.save(config.out, seed=config.seeds[0], **result)
    return result


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Titles, then a task, optimizer, factor and method a row, means over seeds."""
    table = [["task", "optimizer", "rate", "method", "loss", "accuracy", "seeds"]]
    runs, seeds = result["runs"], result["seeds"]
    for task, optimizer in pairs(runs):
        tuned = tuned_rate(task, optimizer, seeds[0], runs)
        for factor, method in itertools.product(result["factors"], METHODS):
            if ends := of_seeds(result, task, optimizer, factor * tuned, method):
                rate = f"{factor * tuned:g}"
                cells = [
                    mean_and_range(ends, name)
                    for name in ("test_loss", "test_accuracy")
                ]
                table.append([task, optimizer, rate, method, *cells, str(len(ends))])
    return table


def pairs(runs: list[Run]) -> list[tuple[str, str]]:
    """Tasks and optimizers, in the order in which they were run."""
    return list(dict.fromkeys((run["task"], run["optimizer"]) for run in runs))


def of_seeds(
    result: dict[str, Any], task: str, optimizer: str, rate: float, method: str
) -> list[Run]:
    """The runs that differ in their seed alone."""
    wanted = [key(task, optimizer, rate, method, seed) for seed in result["seeds"]]
    return [run for each in wanted if (run := found(result["runs"], each))]


def mean_and_range(runs: list[Run], name: str) -> str:
    """Of the seeds: `0.064 (0.062-0.067)`; or that it diverged."""
    values = [run[name] for run in runs]
    if None in values:
        return "diverged"
    mean, least, most = (of(values) for of in (statistics.mean, min, max))
    return f"{mean:.4f} ({least:.4f}-{most:.4f})"


def picture(result: dict[str, Any], path: pathlib.Path) -> None:
    """Training loss on the way at the tuned rate, a panel a task and optimizer."""
    of_all = pairs(result["runs"])
    tasks = list(dict.fromkeys(task for task, _ in of_all))
    optimizers = list(dict.fromkeys(optimizer for _, optimizer in of_all))
    size = (4 * len(optimizers), 3 * len(tasks))
    figure = new_figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(tasks), len(optimizers), squeeze=False)
    for task, optimizer in of_all:
        axes = panels[tasks.index(task), optimizers.index(optimizer)]
        rate = tuned_rate(task, optimizer, result["seeds"][0], result["runs"])
        for place, method in enumerate(DRAWN):
            for number, run in enumerate(
                of_seeds(result, task, optimizer, rate, method)
            ):
                losses = [math.nan if x is None else x for x in run["losses"]]
                label = None if number else method
                axes.plot(losses, color=f"C{place}", linewidth=1, label=label)
        axes.set(title=f"{task}, {optimizer}, {rate:g}", yscale="log")
        axes.grid(alpha=0.3, which="both")
    for axes in panels[:, 0]:
        axes.set_ylabel("training loss")
    for axes in panels[-1]:
        axes.set_xlabel("of 25 parts of the run")
    panels[0, 0].legend(fontsize="x-small")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
