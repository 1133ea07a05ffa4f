"""Trains in one way on one of the hosts of a cluster, and tests copies on the way.

Every host runs this program. The clock and the counter of bytes start after the first
step. Copies of the parameters are tested when the run is over, so that the clock
measures nothing but training.
"""

import dataclasses
import pathlib
import time
from typing import Any

import jax
import tyro

from experiments import methods
from experiments.cluster import member
from experiments.methods import TextProblem


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a run."""

    method: str
    """The way to train, by its name in `experiments.methods`."""
    problem: TextProblem = dataclasses.field(default_factory=TextProblem)
    """Text, model, batch and optimizer."""
    tests: int = 20
    """The number of tests. The last one is at the end of the run."""
    out: pathlib.Path | None = None
    """File to which the first host writes its figures. By default, it prints them."""


def main(config: Config) -> None:
    """Trains; the first host tests the copies, and writes the figures."""
    rank = member.join()
    method = methods.make(config.method, config.problem)
    figures = trained(method, config.problem, config.tests)
    method.close()
    copies = figures.pop("copies")
    if rank == 0:
        losses = [config.problem.test(params) for params in copies]
        member.answer({**figures, "loss": losses}, config.out)
    member.barrier()  # the other hosts wait while the first one tests


def trained(
    method: methods.Method, problem: TextProblem, tests: int
) -> dict[str, list[Any]]:
    """Trains once, and copies the parameters at even intervals.

    Returns:
      For each copy its step, the seconds of training before it, the megabytes that this
      host has sent before it, and the copy.
    """
    batches = problem.batches(jax.process_index(), jax.process_count())
    found: dict[str, list[Any]] = {
        name: [] for name in ("steps", "seconds", "megabytes", "copies")
    }
    member.barrier()
    method.step(next(batches))
    method.wait()
    start, before = time.perf_counter(), member.wire()
    for step in range(2, problem.steps + 1):
        method.step(next(batches))
        if step == problem.steps:
            method.finish()
        if step * tests // problem.steps > (step - 1) * tests // problem.steps:
            found["copies"].append(jax.device_get(method.params()))
            found["steps"].append(step)
            found["seconds"].append(time.perf_counter() - start)
            found["megabytes"].append(member.wire().since(before).sent / 1e6)
    return found


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
