"""Measures how long a step with many small leaves takes to trace and to compile.

Claim: to trace and to compile, a step of pipejax takes at most 1.3 times as long as a
step written by hand that does the same. Both skip updates by gradients that are not
finite. At width 2 with prediction, both update twice. The limit is 1. The result also
has the shortest step that trains at all, which checks nothing.

Each step trains a residual network with AdamW on one CPU device. The times are
processor seconds of all threads of XLA, so that other programs on the machine hardly
change them. The result has medians over rounds. In each round, every step is traced and
compiled anew, without a cache.

Command: python -m experiments.compile_time
Time: about 25 minutes on 2 cores.
Result: experiments/results/compile_time.json
"""

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import optax
import tyro
from jax.sharding import Mesh

import pipejax as pj

from . import by_hand, overlap, report


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    leaves: tuple[int, ...] = (100, 400, 800)
    """Numbers of leaves of the models: matrices of 64 x 64 and vectors of 64."""
    rounds: int = 5
    """Number of rounds. Each round compiles every step once."""
    out: pathlib.Path = report.RESULTS / "compile_time.json"
    """File to write the result to, as JSON."""


# For each step of pipejax, the step by hand that does the same.
TWINS = {
    "K=1": "by hand, checked",
    "K=2, plain": "by hand, checked",
    "K=2, predicted": "by hand, predicted",
}
BAR = 1.3


def main(config: Config) -> dict[str, Any]:
    """Compiles every step, prints the table, and writes the result file."""
    jax.config.update("jax_enable_compilation_cache", False)
    rows = {}
    for leaves in config.leaves:
        rows[str(leaves)] = measured(leaves, config.rounds)
    report.save(config.out, seed=0, limit=1.0, bar=BAR, twins=TWINS, leaves=rows)
    report.console(width=120).print(report.table("processor seconds", table(rows)))
    return rows


def measured(leaves: int, rounds: int) -> dict[str, Any]:
    """Returns the median processor seconds of tracing and of compiling each step."""
    mesh = pj.data_mesh(1)
    problem, tx = overlap.small_leaves(leaves, 1), optax.adamw(1e-3)
    times: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, lower in steps(problem, tx, mesh).items():
            times.setdefault(name, []).append(timed(lower))
    found: dict[str, Any] = {}
    for name, pairs in times.items():
        totals = [sum(pair) for pair in pairs]
        found[name] = {
            "trace": statistics.median(pair[0] for pair in pairs),
            "compile": statistics.median(pair[1] for pair in pairs),
            "total": statistics.median(totals),
            "least": min(totals),
            "greatest": max(totals),
        }
    for name, twin in TWINS.items():
        found[name]["ratio"] = found[name]["total"] / found[twin]["total"]
        found[name]["to_the_shortest"] = (
            found[name]["total"] / found["by hand"]["total"]
        )
    return found


def steps(
    problem: overlap.Problem, tx: optax.GradientTransformation, mesh: Mesh
) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Returns functions that trace the steps, by name; no step was traced before."""
    params, batch = problem.params, problem.batch
    args = params, jax.eval_shape(tx.init, params)

    def hand(**options: Any) -> Any:
        step = by_hand.synchronous(problem.loss_fn, tx, mesh, **options)
        return lambda: step.lower(*args, batch)

    predicted = by_hand.pipelined(problem.loss_fn, tx, mesh, predicts=True, checks=True)

    def ours(width: int, **options: Any) -> Any:
        train = pj.make_train_step(
            problem.loss_fn, tx, mesh=mesh, width=width, **options
        )
        state = train.abstract_state(params)
        return lambda: train.lower(state, batch)

    return {
        "by hand": hand(),
        "by hand, checked": hand(checks=True),
        "by hand, predicted": lambda: predicted.lower(*args, params, batch),
        "K=1": ours(1),
        "K=2, plain": ours(2, weight_prediction=False),
        "K=2, predicted": ours(2, weight_prediction="own"),
    }


def timed(lower: Callable[[], jax.stages.Lowered]) -> tuple[float, float]:
    """Returns the processor seconds of tracing a step, and those of compiling it."""
    start = time.process_time()
    lowered = lower()
    traced = time.process_time()
    lowered.compile()
    return traced - start, time.process_time() - traced


def table(found: dict[str, Any]) -> list[list[str]]:
    """Returns the table of steps by hand, and of the ratios to them.

    The last column is width 2 with prediction over the shortest step that trains.
    """
    by_hand = ["by hand, s", "by hand with prediction, s"]
    widths = ["width 1", "width 2, plain", "width 2, predicted"]
    rows = [["parameter arrays", *by_hand, *widths, "over the shortest step"]]
    for leaves, row in found.items():
        twins = (row[name]["total"] for name in dict.fromkeys(TWINS.values()))
        ratios = [row[name]["ratio"] for name in TWINS]
        ratios.append(row["K=2, predicted"]["to_the_shortest"])
        rows.append(
            [leaves, *(f"{x:.1f}" for x in twins), *(f"{x:.2f}" for x in ratios)]
        )
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
