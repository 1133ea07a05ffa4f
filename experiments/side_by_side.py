r"""Times several methods of training side by side, on the hosts of a cluster.

Every host runs this program. In every round, each method takes its turn. A turn starts
at a barrier. The method fills its pipeline with steps, and then runs some steps against
the clock, until the slowest host has its parameters. The bytes are those that the links
of the hosts have counted.

Command: python -m experiments.cluster --hosts 4 --rate 500mbit -- \
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
from pipejax import timing

from . import methods
from .cluster import member
from .methods import Method, Problem


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    problem: Problem = dataclasses.field(default_factory=Problem)
    """Model, batch and optimizer to train with."""
    methods: tuple[str, ...] = ("compute", "D-Sync", "Pipe-SGD", "Pipe-SGD, int8")
    """Methods to time, by their names in `experiments.methods`."""
    rounds: int = 5
    """Number of rounds. In each round, every method takes its turn."""
    steps: int = 3
    """Number of timed steps in a turn."""
    measured: tuple[str, ...] = ("Pipe-SGD", "Pipe-SGD, int8")
    """Methods of which `pj.overlap.measure` also times compute, exchange and step."""
    profiled: tuple[str, ...] = ()
    """Methods whose exchange is also timed alone, and the codec's part of it."""
    data_dir: pathlib.Path | None = None
    """Folder of TFDS data sets. By default, images are random."""
    out: pathlib.Path | None = None
    """File to which the first host writes its figures. By default, it prints them."""


def main(config: Config) -> None:
    """Times all methods; the first host writes the figures or prints them."""
    rank = member.join()
    batch = (
        config.problem.random_batch(rank)
        if config.data_dir is None
        else config.problem.real_batch(rank, config.data_dir)
    )
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
        "profiles": {name: profiled(found[name], config) for name in config.profiled},
    }
    for method in found.values():
        method.close()
    if rank == 0:
        member.answer(figures, config.out)


def timed(
    found: dict[str, Method], batch: Any, rounds: int, steps: int
) -> dict[str, Any]:
    """Returns what a step of each method takes: seconds, core seconds and bytes.

    Each figure is the largest of all hosts. Seconds and core seconds are lists with an
    entry for each round. Bytes are the median over rounds.
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
    """The cost of one step on this host, as a mean over the steps of a turn.

    Attributes:
      seconds: Wall-clock seconds.
      cores: Seconds for which the cores of the machine worked, divided by the number of
        cores. A step cannot take less.
      carried: Bytes of one exchange over the link of this host, in the busier
        direction.
    """

    seconds: float
    cores: float
    carried: float


def turn(method: Method, batch: Any, steps: int) -> Turn:
    """Runs one turn: fills the pipeline, times some steps, and drains."""
    member.barrier()  # later, another thread has reductions in flight
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
    # A drain is not counted: with a sharded optimizer, it also gathers the parameters.
    method.join()
    member.barrier()
    carried = member.wire().since(before)
    method.finish()
    # A pipeline begins with an exchange of zeros for each step of delay.
    exchanges = method.width - 1 + filling + steps
    return Turn(seconds, worked, max(carried) / exchanges)


def measured(method: Any, batch: Any, config: Config) -> dict[str, Any]:
    """Returns what `pj.overlap.measure` measures, at the slowest host."""
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


def profiled(method: Any, config: Config) -> dict[str, float]:
    """Returns the seconds of an exchange alone, and of its codec's part of them."""
    train = method.train
    case = timing.Case(train.config.all_reduce, config.problem.elements)
    cases = {"exchange": case}
    (phases,) = timing.profile(train.mesh, cases, config.rounds).values()
    (whole,) = timing.exchange_times(train.mesh, cases, config.rounds).values()
    return {
        "exchange": statistics.median(whole),
        "codec": phases.encode + phases.reduction + phases.decode,
    }


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
