"""Times local steps beside a pipeline, on one of the hosts of a cluster.

Every host runs this program. In every round, each method takes its turn. A turn of
local steps begins with a round that is not timed, so that its exchange is under way
where it can be hidden, and then times whole rounds.
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable

import tyro

from experiments import methods
from experiments.cluster import member
from experiments.methods import Local, Method, Problem
from pipejax import codecs

LEAST = 16  # timed steps of a turn, at least


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    problem: Problem = dataclasses.field(default_factory=Problem)
    """Model, batch and optimizer to train with."""
    sync_every: int = 32
    """Number of steps of a round."""
    rounds: int = 3
    """Number of rounds. In each round, every method takes its turn."""
    steps: int = 3
    """Number of timed steps in a turn of the methods that exchange in every step."""
    out: pathlib.Path | None = None
    """File to which the first host writes its figures. By default, it prints them."""


def makers(every: int) -> dict[str, Callable[[Problem], Method]]:
    """Returns what makes each method, by name."""
    steps = ("compute", "D-Sync", "Pipe-SGD")
    int8, int4 = map(methods.fed_back, (codecs.int8(), codecs.int4()))
    return {
        **{name: functools.partial(methods.make, name) for name in steps},
        "local, at once": lambda problem: Local(problem, every, 0),
        "local, hidden": lambda problem: Local(problem, every, every),
        "local, hidden, int8": lambda problem: Local(problem, every, every, int8),
        "local, hidden, int4": lambda problem: Local(problem, every, every, int4),
    }


def turn(method: Method, batch: methods.Batch, steps: int) -> float:
    """Returns the seconds of a step, as a mean over those of a turn."""
    filling = 1
    if isinstance(method, Local):
        filling = method.sync_every
        steps = filling * -(-LEAST // filling)
    member.barrier()
    for _ in range(filling):
        method.step(batch)
    method.wait()
    start = time.perf_counter()
    for _ in range(steps):
        method.step(batch)
    method.wait()
    seconds = (time.perf_counter() - start) / steps
    method.join()
    member.barrier()
    method.finish()
    return seconds


def main(config: Config) -> None:
    """Times all methods; the first host prints the seconds of a step of each."""
    rank = member.join()
    batch = config.problem.random_batch(rank)
    found = {
        name: make(config.problem) for name, make in makers(config.sync_every).items()
    }
    turns: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(config.rounds):
        for name, method in found.items():
            turns[name].append(turn(method, batch, config.steps))
    slowest = {name: member.largest(taken) for name, taken in turns.items()}
    if rank == 0:
        figures = {"seconds": slowest, "elements": config.problem.elements}
        member.answer(figures, config.out)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
