"""Ways to train, timed side by side on the hosts of a cluster; runs on each of them.

In every round each way takes its turn: from a barrier, a step that fills its pipeline,
then some steps against the clock, until the slowest host has its parameters. Bytes are
those that the hosts' links counted.

Command: python -m experiments.cluster --hosts 4 --rate 500mbit -- \\
         python -m experiments.side_by_side --methods D-Sync Pipe-SGD
Time: about 10 seconds, and methods x rounds x steps.
"""

import dataclasses
import pathlib
import statistics
import time
from typing import Any, NamedTuple

import tyro

import pipejax as pj

from . import methods
from .cluster import member
from .methods import Method, Problem


@dataclasses.dataclass(frozen=True)
class Config:
    """What is timed."""

    problem: Problem = dataclasses.field(default_factory=Problem)
    """What is trained."""
    methods: tuple[str, ...] = ("compute", "D-Sync", "Pipe-SGD", "Pipe-SGD, int8")
    """Names, as of `experiments.methods`."""
    rounds: int = 5
    """In each, all take their turn."""
    steps: int = 3
    """Of each in a turn."""
    measured: tuple[str, ...] = ("Pipe-SGD", "Pipe-SGD, int8")
    """Of these also compute, exchange and step, in turn, by `pj.overlap.measure`."""
    out: pathlib.Path | None = None
    """Where the first host writes its figures; by default it prints them."""


def main(config: Config) -> None:
    """Times all; the first host says what came out."""
    rank = member.join()
    batch = config.problem.random_batch(rank)
    found, missing = {}, {}
    for name in config.methods:
        try:
            found[name] = methods.make(name, config.problem)
        except methods.NotInstalledError as error:
            missing[name] = str(error)
    figures: dict[str, Any] = {
        "elements": config.problem.elements,
        "methods": timed(found, batch, config.rounds, config.steps),
        "missing": missing,
        "measured": {
            name: measured(found[name], batch, config)
            for name in config.measured
            if name in found
        },
    }
    for method in found.values():
        method.close()
    if rank == 0:
        member.answer(figures, config.out)


def timed(
    found: dict[str, Method], batch: Any, rounds: int, steps: int
) -> dict[str, Any]:
    """Returns of each way what its steps took, of the slowest or busiest host.

    Seconds and the cores' seconds are lists, an entry a round; bytes are the median.
    """
    for method in found.values():
        turn(method, batch, 1)  # compile
    turns: dict[str, list[Turn]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, method in found.items():
            turns[name].append(turn(method, batch, steps))
    figures = {}
    for name, taken in turns.items():
        seconds, cores, carried = map(member.largest, zip(*taken, strict=True))
        figures[name] = {
            "seconds": seconds,
            "cores": cores,
            "wire_bytes": statistics.median(carried),
        }
    return figures


class Turn(NamedTuple):
    """What one step took on this host, the mean of a turn's.

    Attributes:
      seconds: by the clock.
      cores: seconds for which the machine's cores worked, over their number; a step
        cannot take less.
      carried: bytes over the host's link, in the busier direction.
    """

    seconds: float
    cores: float
    carried: float


def turn(method: Method, batch: Any, steps: int) -> Turn:
    """Fills the pipeline, times some steps, and drains."""
    member.barrier()  # not later: what is in flight is on another thread
    before = member.wire()
    filling = method.width - 1 or 1
    for _ in range(filling):
        method.step(batch)
    method.wait()
    start, worked = time.perf_counter(), member.cores()
    for _ in range(steps):
        method.step(batch)
    method.wait()
    seconds = (time.perf_counter() - start) / steps
    worked = (member.cores() - worked) / steps
    method.finish()
    member.barrier()
    carried = member.wire().since(before)
    # A pipeline begins with a sum of zeros for each step of delay.
    exchanges = method.width - 1 + filling + steps
    return Turn(seconds, worked, max(carried) / exchanges)


def measured(method: Any, batch: Any, config: Config) -> dict[str, Any]:
    """What `pj.overlap.measure` says, of the slowest host."""
    found = pj.overlap.measure(
        method.train,
        method.state,
        method.train.batch(batch),
        rounds=config.rounds,
        steps=config.steps,
    )
    slowest = pj.overlap.Measurement(
        *(tuple(member.largest([*values])) for values in found)
    )
    return {**slowest._asdict(), "ratio": slowest.ratio}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
