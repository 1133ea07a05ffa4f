"""Programs and optimizers that others wrote, in pipejax and in loops written by hand.

Claim: at width 1, at width 2 with a plain delay and at width 2 with weight prediction,
pipejax trains each of them as its twin does, a loop of plain JAX that imports nothing
of pipejax: parameters after every step and after the drain, every loss and metric, and
the model state differ by rounding alone. What it cannot train so, it refuses.

Programs are Flax's examples (MNIST, ImageNet, nlp_seq, lm1b), written anew and small, a
Flax NNX and an Equinox model. Optimizers are all of Optax's, `optax.contrib`'s,
wrappers, and chains, on one small regression. Four devices, or in the twin four shares
of a batch, or the whole batch on one device where that is what a program means. How the
bound on a difference is found: `experiments/clients/_rounding.py`.

Command: pip install equinox, and python -m experiments.clients
Time: about ten minutes on 2 cores.
Result: experiments/results/clients.json, the tables of docs/clients.md
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
from ._table import refusals, rows, with_tables


@dataclasses.dataclass(frozen=True)
class Config:
    """What is run."""

    programs: tuple[str, ...] = tuple(PROGRAMS)
    """Whole programs, by name."""
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    """Optimizers, by name."""
    ways: tuple[str, ...] = tuple(WAYS)
    """How they are trained."""
    seed: int = 0
    """Of parameters, data and the twin's disturbances."""
    out: pathlib.Path = report.RESULTS / "clients.json"
    """Where the result goes."""
    page: pathlib.Path | None = pathlib.Path("docs/clients.md")
    """The document whose tables are written anew; `None` for none."""


def main(config: Config) -> dict[str, Any]:
    """Trains all clients; prints and writes the differences."""
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
    show(result, config.page)
    return result


def tables(result: dict[str, Any]) -> list[list[list[str]]]:
    """Returns the tables of programs, of optimizers, and of what is refused."""
    return [
        rows(result["programs"], "program"),
        rows(result["optimizers"], "optimizer"),
        refusals(result["optimizers"]),
    ]


def show(result: dict[str, Any], page: pathlib.Path | None) -> None:
    """Prints the tables, and writes them into the document."""
    console = report.console(width=120)
    for table in tables(result):
        console.print(report.table("largest difference / bound", table))
    if page:
        page.write_text(with_tables(page.read_text(), *tables(result)))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
