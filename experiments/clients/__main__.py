"""Compares pipejax with hand-written loops, on programs and optimizers of others.

Claim: at width 1, at width 2 with a plain delay and at width 2 with weight prediction,
pipejax trains each client as its twin does. The twin is a loop in plain JAX that
imports nothing of pipejax. The parameters after every step and after the drain, every
loss and metric, and the model state at the end differ by rounding alone. pipejax
refuses the clients that it cannot train in this way.

The programs are Flax's examples (MNIST, ImageNet, nlp_seq, lm1b), rewritten in small, a
Flax NNX model, an Equinox model, and four whose losses take an input that all devices
share: a GAN, TD3, a mean teacher and a physics-informed network. The optimizers are all
of Optax's, those of `optax.contrib`, wrappers, and chains; they train one small
regression. pipejax runs on four devices. Depending on the program, the twin takes the
whole batch on one device, or averages over four shares of the batch. With weight
prediction, the twin always takes shares. The bound on a difference is derived in
`experiments/clients/_rounding.py`.

Command: pip install equinox, and python -m experiments.clients
Time: about fifteen minutes on 2 cores.
Result: experiments/results/clients.json
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import tyro

from experiments import report

from ._compare import WAYS, compared
from ._optimizers import OPTIMIZERS, client
from ._pieces import DEVICES
from ._programs import PROGRAMS
from ._rounding import RUNS
from ._table import optimizers, programs, refusals


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison."""

    programs: tuple[str, ...] = tuple(PROGRAMS)
    """The names of the programs to train."""
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    """The names of the optimizers to train with."""
    ways: tuple[str, ...] = tuple(WAYS)
    """The ways to train: width 1, width 2 plain or width 2 predicted."""
    seed: int = 0
    """The seed of the parameters, the data and the disturbances of the twin."""
    out: pathlib.Path = report.RESULTS / "clients.json"
    """The file that the result is written to."""


def main(config: Config) -> dict[str, Any]:
    """Trains all clients, then prints and saves the differences."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    made = {name: PROGRAMS[name] for name in config.programs}
    made |= {name: functools.partial(client, name) for name in config.optimizers}
    found = {}
    for name, make in made.items():
        found[name] = compared(make(config.seed), config.seed, config.ways)
        print(name, flush=True)
    result = {
        "programs": {name: found[name] for name in config.programs},
        "optimizers": {name: found[name] for name in config.optimizers},
    }
    settings = {"devices": DEVICES, "disturbed_runs": RUNS}
    report.save(config.out, seed=config.seed, **settings, **result)
    console = report.console(width=120)
    for table in (
        programs(result["programs"]),
        optimizers(result["optimizers"]),
        refusals(result["optimizers"]),
    ):
        console.print(report.table("largest difference / bound", table))
    return result


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
