"""How sharp losses are where networks train, beside what a delay leaves stable.

Claim: where learning rate times sharpness, in the median over the first half of a
synchronous run, is below the limit that `pj.stability` has for a width, weight
prediction loses little at that width; beyond it mostly more. So what a delay costs can
be told before it is there.

Sharpness is the largest eigenvalue of the loss's Hessian; of AdamW in coordinates in
which it divides by nothing, and the limit is that of its first moment. It is taken at
six places of the first half of a run, in which the rate is large, on training examples:
1,024 images of MNIST, 256 of CIFAR-10, 64 windows of text. Tasks, rates and what runs
of width 2 and 3 lost are those of `experiments.convergence`, whose result is read.

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
from pipejax.picture import new_figure

from ._change import change, spread
from ._contenders import METHODS, OPTIMIZERS, Method, Optimizer
from ._runs import Run, Setting, key, tuned_rate
from ._tasks import TASKS, make_task

# Of a run. The rate is largest at the first, and 0.59 of that at the last.
PLACES = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
# The linear part of an optimizer, at a learning rate of 1.
LINEAR = {
    "momentum": optax.sgd(1.0, momentum=0.9),
    "adamw": optax.chain(optax.ema(0.9, debias=False), optax.scale(-1.0)),
}
SHOWN = ("K=2, predicted", "K=3, predicted")
DRAWN = ("K=2, plain", "K=3, plain", *SHOWN)
MARKERS = {"momentum": "o", "adamw": "s"}
# Of test loss, in the picture: what loses more, or diverged, is drawn here.
WORST = 3.0


@dataclasses.dataclass(frozen=True)
class Config:
    """What is measured."""

    tasks: tuple[str, ...] = TASKS
    """Of `experiments.learning`."""
    optimizers: tuple[str, ...] = tuple(LINEAR)
    """Whose limits are known."""
    factors: tuple[float, ...] = (1.0, 2.0)
    """Times the tuned learning rate."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of parameters and batches."""
    steps: int | None = None
    """Of which a run is the first half; by default the task's own."""
    data_dir: pathlib.Path | None = None
    """Where TFDS data sets lie; by default TFDS's own folder."""
    text: pathlib.Path = pathlib.Path("tinyshakespeare.txt")
    """What the transformer reads."""
    runs: pathlib.Path = report.RESULTS / "convergence.json"
    """What was tuned, and what a delay cost."""
    out: pathlib.Path = report.RESULTS / "convergence_sharpness.json"
    """Where the result goes."""
    plot: pathlib.Path = pathlib.Path("docs/sharpness.png")
    """Where the picture goes."""


def main(config: Config) -> list[Run]:
    """Measures all; prints the table, writes, draws."""
    jax.config.update("jax_platforms", "cpu")
    compared = json.loads(config.runs.read_text())
    found = list(run_all(config, compared))
    report.save(config.out, seed=config.seeds[0], places=PLACES, runs=found)
    report.console(width=160).print(report.table("sharpness", rows(found, compared)))
    picture(found, compared, config.plot)
    return found


def run_all(config: Config, compared: dict[str, Any]) -> Iterator[Run]:
    """A run a task, optimizer, rate and seed."""
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
    """Learning rate times sharpness at `PLACES` of a synchronous run."""
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
    """What AdamW divides its updates by; None for an optimizer that does not."""

    def is_adam(node: Any) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    adams = filter(is_adam, jax.tree.leaves(opt_state, is_leaf=is_adam))
    if (adam := next(adams, None)) is None:
        return None
    nu = optax.tree_utils.tree_bias_correction(adam.nu, 0.999, adam.count)
    return jax.tree.map(lambda second: second**0.5 + 1e-8, nu)


def rows(found: list[Run], compared: dict[str, Any]) -> list[list[str]]:
    """Medians over places, means of these over seeds; beside it what was lost."""
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
    """Runs that differ in their seed alone, together."""
    for setting, runs in itertools.groupby(
        found, key=lambda run: (run["task"], run["optimizer"], run["rate"])
    ):
        yield setting, list(runs)


def typical(runs: list[Run]) -> float:
    """Learning rate times sharpness: median over places, mean over seeds."""
    return statistics.mean(
        statistics.median(run["rate_times_sharpness"]) for run in runs
    )


def share(runs: list[Run], method: str) -> float:
    """Of the limit; above 1 it is exceeded."""
    how = METHODS[method]
    limit = pj.stability.max_curvature(
        LINEAR[runs[0]["optimizer"]],
        how.width,
        weight_prediction=how.weight_prediction,
    )
    return typical(runs) / limit


def lost(compared: dict[str, Any], setting: Setting, method: str) -> str:
    """`+0.0012 ± 0.0004`, of test loss; or that a run diverged; empty if not run."""
    if (found := change(compared, setting, method)) is None:
        return ""
    return spread(found.nats, 4) if found.nats else "diverged"


def cost(compared: dict[str, Any], setting: Setting, method: str) -> float:
    """The mean over seeds, at most `WORST`; no number if it was not run."""
    if (found := change(compared, setting, method)) is None:
        return math.nan
    return min(WORST, statistics.mean(found.nats)) if found.nats else WORST


def picture(found: list[Run], compared: dict[str, Any], path: pathlib.Path) -> None:
    """What a delay cost over the share of its limit, a point a setting and method.

    Circles are of momentum, squares of AdamW.
    """
    figure = new_figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for place, method in enumerate(DRAWN):
        for number, (optimizer, marker) in enumerate(MARKERS.items()):
            points = [
                (share(runs, method), cost(compared, setting, method))
                for setting, runs in by_setting(found)
                if setting[1] == optimizer
            ]
            across, up = zip(*points, strict=True) if points else ((), ())
            label = None if number else method
            axes.plot(across, up, marker, color=f"C{place}", label=label)
    axes.axvline(1, color="gray", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_ylim(-0.005, 2 * WORST)
    axes.set_xlabel("learning rate x sharpness, of the limit of this width")
    axes.set_ylabel("change of test loss, nats")
    axes.set_yticks([0, 0.01, 0.1, 1, WORST], ["0", "0.01", "0.1", "1", "diverged"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
