"""Compares the sharpness of real losses with the limits of stability under a delay.

Claim: learning rate times sharpness predicts what a delay costs. Its median over the
first half of a synchronous run is compared with the limit that `pj.stability` has for a
width. Below the limit, weight prediction loses little at that width. Beyond the limit,
it mostly loses more. The cost of a delay is thus known before there is a delay.

Sharpness is the largest eigenvalue of the Hessian of the loss. For AdamW, the Hessian
is taken in coordinates in which the optimizer does not divide its updates, and the
limit is that of its first moment. Sharpness is measured at six points in the first half
of a run, where the learning rate is large. It is measured on training examples: 1,024
images of MNIST, 256 images of CIFAR-10, or 64 windows of text. The tasks, the rates and
the costs of widths 2 and 3 are those of `experiments.convergence`, whose result is
read.

Command: python -m experiments.convergence.sharpness --text tinyshakespeare.txt
Time: half an hour on 2 cores.
Result: experiments/results/convergence_sharpness.json, docs/sharpness.png
"""

import dataclasses
import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import tyro

import pipejax as pj
from experiments import learning, report
from pipejax._internal.figures import new_figure

from ._change import change, spread
from ._contenders import METHODS, OPTIMIZERS, Method, Optimizer
from ._runs import Run, Setting, key, tuned_rate
from ._tasks import TASKS, make_task

# Shares of a run. The learning rate is largest at the first, and 0.59 times as large
# at the last.
PLACES = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
# The linear parts of the optimizers, at a learning rate of 1.
LINEAR = {
    "momentum": optax.sgd(1.0, momentum=0.9),
    "adamw": optax.chain(optax.ema(0.9, debias=False), optax.scale(-1.0)),
}
SHOWN = ("K=2, predicted", "K=3, predicted")
DRAWN = ("K=2, plain", "K=3, plain", *SHOWN)
MARKERS = {"momentum": "o", "adamw": "s"}
# The change of test loss at which the picture draws runs that lose more or diverge.
WORST = 3.0


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    tasks: tuple[str, ...] = TASKS
    """The names of the tasks, which are those of `experiments.learning`."""
    optimizers: tuple[str, ...] = tuple(LINEAR)
    """The names of the optimizers, for which the limit must be known."""
    factors: tuple[float, ...] = (1.0, 2.0)
    """The learning rates to measure at, as multiples of the tuned rate."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds of parameters and batches."""
    steps: int | None = None
    """The steps of a whole run, of which half is run; by default those of the task."""
    data_dir: pathlib.Path | None = None
    """The folder of the TFDS data sets; by default TFDS's own folder."""
    text: pathlib.Path = pathlib.Path("tinyshakespeare.txt")
    """The text file that the transformer learns from."""
    runs: pathlib.Path = report.RESULTS / "convergence.json"
    """The result of `experiments.convergence`: tuned rates, and costs of delays."""
    out: pathlib.Path = report.RESULTS / "convergence_sharpness.json"
    """The file that the result is written to."""
    plot: pathlib.Path = pathlib.Path("docs/sharpness.png")
    """The file that the picture is written to."""


def main(config: Config) -> list[Run]:
    """Measures everything, prints the table, saves the result, and draws."""
    jax.config.update("jax_platforms", "cpu")
    compared = json.loads(config.runs.read_text())
    found = list(run_all(config, compared))
    report.save(config.out, seed=config.seeds[0], places=PLACES, runs=found)
    report.console(width=160).print(report.table("sharpness", rows(found, compared)))
    picture(found, compared, config.plot)
    return found


def run_all(config: Config, compared: dict[str, Any]) -> Iterator[Run]:
    """Yields the measured run of each task, optimizer, rate and seed."""
    for name in config.tasks:
        task = make_task(
            name, text=config.text, data_dir=config.data_dir, steps=config.steps
        )
        for optimizer, factor in itertools.product(config.optimizers, config.factors):
            first = compared["seeds"][0]
            rate = factor * tuned_rate(name, optimizer, first, compared["runs"])
            for seed in config.seeds:
                found = on_the_way(task, OPTIMIZERS[optimizer], rate=rate, seed=seed)
                run = key(name, optimizer, rate, "K=1", seed)
                print(run, [f"{product:.3g}" for product in found], flush=True)
                yield run | {"rate_times_sharpness": found}


def on_the_way(
    task: learning.Task, optimizer: Optimizer, *, rate: float, seed: int
) -> list[float]:
    """Returns learning rate times sharpness at the `PLACES` of a synchronous run."""
    schedule = task.schedule(rate)
    tx = Method(1).corrected(optimizer, schedule, task.clip)
    step = pj.make_train_step(task.loss, tx, mesh=pj.data_mesh(1), width=1)
    state = step.init(task.init(seed))
    seen = itertools.islice(task.batches(seed + 1000), 4)
    examples = jax.tree.map(lambda *parts: np.concatenate(parts), *seen)
    places = [round(part * task.steps) for part in PLACES]
    found = []
    for count, batch in zip(range(places[-1] + 1), task.batches(seed), strict=False):
        if count in places:
            curvature = pj.stability.sharpness(
                task.loss,
                state.params,
                examples,
                preconditioner=divisor(state.opt_state),
            )
            found.append(float(schedule(count)) * curvature)
        state, _ = step.step(state, batch)
    return found


def divisor(opt_state: optax.OptState) -> Any | None:
    """Returns the divisor of AdamW's updates, or `None` for other optimizers."""

    def is_adam(node: Any) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    adams = filter(is_adam, jax.tree.leaves(opt_state, is_leaf=is_adam))
    if (adam := next(adams, None)) is None:
        return None
    nu = optax.tree_utils.tree_bias_correction(adam.nu, 0.999, adam.count)
    return jax.tree.map(lambda second: second**0.5 + 1e-8, nu)


def rows(found: list[Run], compared: dict[str, Any]) -> list[list[str]]:
    """Returns the table of rate times sharpness, beside what a delay cost.

    Each value is the median over places, and the mean of the medians over seeds.
    """
    titles = ["task", "optimizer", "rate", "rate x sharpness"]
    for name in SHOWN:
        titles += [f"of the limit at K={METHODS[name].width}", name]
    table = [titles]
    for setting, runs in by_setting(found):
        cells = [*setting[:2], f"{setting[2]:g}", f"{typical(runs):.2g}"]
        for name in SHOWN:
            cells += [f"{share(runs, name):.2f}", lost(compared, setting, name)]
        table.append(cells)
    return table


def by_setting(found: list[Run]) -> Iterator[tuple[Setting, list[Run]]]:
    """Yields every setting with its runs, which differ only in their seed."""
    for setting, runs in itertools.groupby(
        found, key=lambda run: (run["task"], run["optimizer"], run["rate"])
    ):
        yield setting, list(runs)


def typical(runs: list[Run]) -> float:
    """Returns rate times sharpness: the mean over seeds of the median over places."""
    return statistics.mean(
        statistics.median(run["rate_times_sharpness"]) for run in runs
    )


def share(runs: list[Run], method: str) -> float:
    """Returns rate times sharpness over the limit of a method.

    A share above 1 exceeds the limit.
    """
    how = METHODS[method]
    limit = pj.stability.max_curvature(
        LINEAR[runs[0]["optimizer"]],
        how.width,
        weight_prediction=bool(how.weight_prediction),
    )
    return typical(runs) / limit


def lost(compared: dict[str, Any], setting: Setting, method: str) -> str:
    """Returns the change of test loss in nats, such as `+0.0012 ± 0.0004`.

    The text is "diverged" if a run diverged, and empty if the method was not run.
    """
    if (found := change(compared, setting, method)) is None:
        return ""
    return spread(found.nats, 4) if found.nats else "diverged"


def cost(compared: dict[str, Any], setting: Setting, method: str) -> float:
    """Returns the mean change of test loss over seeds in nats, at most `WORST`.

    The change is NaN if the method was not run.
    """
    if (found := change(compared, setting, method)) is None:
        return math.nan
    return min(WORST, statistics.mean(found.nats)) if found.nats else WORST


def picture(found: list[Run], compared: dict[str, Any], path: pathlib.Path) -> None:
    """Draws the cost of a delay against rate times sharpness as a share of the limit.

    Each setting and method has one point. Circles are momentum, and squares are AdamW.
    """
    figure = new_figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for place, method in enumerate(DRAWN):
        for optimizer, marker in MARKERS.items():
            points = [
                (share(runs, method), cost(compared, setting, method))
                for setting, runs in by_setting(found)
                if setting[1] == optimizer
            ]
            across, up = zip(*points, strict=True) if points else ((), ())
            label = f"{method}, {optimizer}"
            axes.plot(across, up, marker, color=f"C{place}", label=label)
    axes.axvline(1, color="gray", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_ylim(-0.005, 2 * WORST)
    axes.set_xlabel("learning rate x sharpness, divided by the limit at this width")
    axes.set_ylabel("change of test loss, nats")
    axes.set_yticks([0, 0.01, 0.1, 1, WORST], ["0", "0.01", "0.1", "1", "diverged"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
