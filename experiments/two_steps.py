r"""Times two train steps in turn, as a generator and a discriminator take them.

Claim: on two hosts, a round of both steps takes at most 1.1 times the longer of their
summed computes and their summed exchanges, though one thread launches all exchanges of
a process in one order.

Each round times compute and exchange of both steps alone (`pj.overlap.measure`), and
then some rounds of the two in turn, one after another.

Command: python -m experiments.cluster --hosts 2 --rate 500mbit -- \
         python -m experiments.two_steps
Time: about 5 minutes.
Result: experiments/results/two_steps.json
"""

import dataclasses
import pathlib
import statistics
import time
from typing import Any

import jax
import tyro

import pipejax as pj

from . import methods, report
from .cluster import member
from .methods import Problem


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    generator: Problem = dataclasses.field(
        default_factory=lambda: Problem("wide_mlp", 512)
    )
    """The problem of the first step."""
    discriminator: Problem = dataclasses.field(
        default_factory=lambda: Problem("wide_mlp", 1536)
    )
    """The problem of the second step."""
    method: str = "Pipe-SGD"
    """How both train, by its name in `experiments.methods`."""
    rounds: int = 5
    """The number of rounds."""
    steps: int = 5
    """The number of steps of each kind that are timed together in a round."""
    out: pathlib.Path = report.RESULTS / "two_steps.json"
    """The file of the result."""


def main(config: Config) -> None:
    """Measures on all hosts; the first host prints a table and writes the result."""
    rank = member.join()
    both = {
        name: (methods.make(config.method, problem), problem.random_batch(rank))
        for name, problem in vars(config).items()
        if isinstance(problem, Problem)
    }
    in_turn(both, 1)  # compile
    alone: dict[str, list[pj.overlap.Measurement]] = {name: [] for name in both}
    together: list[float] = []
    for _ in range(config.rounds):
        for name, (method, batch) in both.items():
            alone[name].append(measured(method, batch, config.steps))
        together.append(in_turn(both, config.steps))
    together = member.largest(together)
    figures = [
        {
            "in_turn": seconds,
            "computes": [median(x.compute) for x in pair],
            "exchanges": [median(x.communication) for x in pair],
            "alone": [median(x.step) for x in pair],
        }
        for seconds, *pair in zip(together, *alone.values(), strict=True)
    ]
    for figure in figures:
        limit = max(sum(figure["computes"]), sum(figure["exchanges"]))
        figure["ratio"] = figure["in_turn"] / limit
    if rank == 0:
        settings = {"seed": config.generator.seed, **report.settings(config)}
        report.save(config.out, **settings, found=figures)
        report.console(width=120).print(
            report.table("two steps in turn", rows(figures))
        )


def median(values: tuple[float, ...]) -> float:
    """Returns the median, at the slowest host."""
    (slowest,) = member.largest([statistics.median(values)])
    return slowest


def measured(method: Any, batch: Any, steps: int) -> pj.overlap.Measurement:
    """Returns compute, exchange and step of one of the two, alone."""
    return pj.overlap.measure(
        method.train, method.state, method.train.batch(batch), rounds=2, steps=steps
    )


def in_turn(both: dict[str, tuple[Any, Any]], steps: int) -> float:
    """Returns the seconds of one step of each, taken in turn from full pipelines."""
    member.barrier()
    for method, batch in both.values():
        for _ in range(method.width - 1):
            method.step(batch)
        method.wait()
    start = time.perf_counter()
    for _ in range(steps):
        for method, batch in both.values():
            method.step(batch)
    jax.block_until_ready([method.state for method, _ in both.values()])
    seconds = (time.perf_counter() - start) / steps
    for method, _ in both.values():
        method.join()
    member.barrier()
    for method, _ in both.values():
        method.finish()
    return seconds


def rows(figures: list[dict[str, Any]]) -> list[list[str]]:
    """Returns titles, then a row for each round, in milliseconds."""
    names = ["computes", "exchanges", "alone"]
    table = [["round", *names, "in turn", "over the longer sum"]]
    for number, figure in enumerate(figures):
        pairs = [" + ".join(f"{1e3 * x:.0f}" for x in figure[name]) for name in names]
        whole = f"{1e3 * figure['in_turn']:.0f}"
        table.append([str(number), *pairs, whole, f"{figure['ratio']:.2f}"])
    ratio = statistics.median(figure["ratio"] for figure in figures)
    return [*table, ["median", "", "", "", "", f"{ratio:.2f}"]]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
