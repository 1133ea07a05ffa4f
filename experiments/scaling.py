"""Measures how training scales to 8 hosts, and simulates how it scales to 4,096.

The paper's models time training on more hosts than its authors had. Here, emulated
hosts exchange gradients over real TCP (`experiments.cluster`). They share the cores of
this machine, so that compute would take longer with each further host. Each host
therefore sleeps in place of its compute, for the same time on any number of hosts. The
exchange, the codec and the update are real.

The efficiency is the time of the compute divided by the time of the step. It is 1 if
communication costs nothing. For PS-Async, whose hosts do not wait for one another, the
step is that of the slowest host.

The speeds of the link and the cores are measured on four hosts (`pj.timing.calibrate`).
`pj.timing.simulate` turns them into step times, and `experiments.asynchronous` does so
for PS-Async. The table has the simulated efficiency beside the measured one up to 8
hosts, and the simulated one alone for more hosts. The simulation moves every message of
every step. All simulated hosts have a core of their own, and their switch is never the
limit.

Command: python -m experiments.scaling
Time: about 15 minutes on 2 cores.
Result: experiments/results/scaling.json, docs/scaling.png
"""

import dataclasses
import pathlib
import statistics
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import pipejax as pj
from pipejax import codecs, timing
from pipejax._internal.figures import new_figure

from . import cluster, methods, report, side_by_side
from .asynchronous import simulate_asynchronous
from .cluster import member
from .methods import Problem

CALIBRATED = 4  # hosts


class Simulated(NamedTuple):
    """How the simulation carries out a method, and how the picture shows it.

    Attributes:
      color: The color of the method in the picture.
      width: The width K, or 0 for a worker of an asynchronous parameter server.
      algorithm: The algorithm of the all-reduce.
      codec: The name of the codec, or `None` for no codec.
    """

    color: str
    width: int
    algorithm: Any = "psum"
    codec: str | None = None


METHODS = {
    "PS-Sync": Simulated("tab:gray", 1, "parameter_server"),
    "PS-Async": Simulated("tab:olive", 0),
    "D-Sync": Simulated("tab:red", 1),
    "D-Sync, int8": Simulated("tab:orange", 1, "ring", "int8"),
    "Pipe-SGD": Simulated("tab:blue", 2),
    "Pipe-SGD, int8": Simulated("tab:cyan", 2, "ring", "int8"),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    hosts: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of hosts to emulate."""
    simulated: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    """Numbers of hosts to simulate only."""
    rate: str = "100mbit"
    """Rate of the link of each host, in each direction."""
    seconds: float = 0.75
    """Seconds that each host sleeps in a step, in place of its compute."""
    elements: int = 2**20
    """The number of parameters. Their gradients have four bytes each."""
    rounds: int = 3
    """Number of rounds. In each round, every method takes its turn."""
    steps: int = 2
    """Number of timed steps in a turn."""
    on_host: bool = False
    """Measure on this host of a cluster. The program calls itself with this flag."""
    out: pathlib.Path = report.RESULTS / "scaling.json"
    """File to write the result to, as JSON."""
    plot: pathlib.Path = pathlib.Path("docs/scaling.png")
    """File to write the picture to, as PNG."""


@dataclasses.dataclass(frozen=True)
class Pause(Problem):
    """A problem whose compute is a pause, with a gradient that it reads."""

    seconds: float = 0.75
    size: int = 2**20

    def _init(self) -> Any:
        return {"w": jnp.zeros(self.size)}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Sleeps, and returns a loss whose gradient is the batch's."""
        gradient = batch["gradient"][0]
        zero = jax.pure_callback(self._sleep, gradient[0], gradient[0])
        return jnp.vdot(params["w"], gradient + zero)

    def _sleep(self, first: Any) -> Any:
        time.sleep(self.seconds)
        return np.zeros_like(first)

    def random_batch(self, host: int) -> Any:
        """Returns the gradient of this host, [1, size]."""
        rng = np.random.default_rng((self.seed, host))
        return {"gradient": rng.normal(size=(1, self.size)).astype(np.float32)}


def main(config: Config) -> None:
    """Measures and simulates, prints the table, and writes the result and picture."""
    if config.on_host:
        measure(config)
        return
    if CALIBRATED not in config.hosts:
        sys.exit(
            f"`hosts` must contain {CALIBRATED}, on which speeds are measured; got"
            f" {config.hosts}."
        )
    jax.config.update("jax_platforms", "cpu")
    answers = {hosts: asked(hosts, config) for hosts in config.hosts}
    speeds = next(x["cluster"] for x in answers.values() if x["cluster"])
    cells = [
        {
            "hosts": hosts,
            "measured": measured_efficiencies(answers.get(hosts), config.seconds),
            "simulated": {
                name: simulated(speeds, hosts, method, config)
                for name, method in METHODS.items()
            },
        }
        for hosts in (*config.hosts, *config.simulated)
    ]
    settings = report.settings(config)
    del settings["on_host"]
    report.save(config.out, **{"seed": 0, **settings}, cluster=speeds, cells=cells)
    report.console(width=140).print(report.table("Efficiency", table(cells)))
    picture(cells, config.plot)


def asked(hosts: int, config: Config) -> dict[str, Any]:
    """Starts a cluster of `hosts` hosts and returns its measurements."""
    print(f"{hosts} hosts", flush=True)
    return cluster.ask(
        cluster.Network.of(hosts, (config.rate,)),
        "experiments.scaling",
        [
            *("--on-host", "--seconds", str(config.seconds)),
            *("--elements", str(config.elements)),
            *("--rounds", str(config.rounds), "--steps", str(config.steps)),
        ],
    )


def measure(config: Config) -> None:
    """Times every method together with other hosts; the first host answers."""
    rank = member.join()
    problem = Pause(seconds=config.seconds, size=config.elements)
    found = {name: methods.make(name, problem) for name in METHODS}
    batch = problem.random_batch(rank)
    figures: dict[str, Any] = {
        "methods": side_by_side.timed(found, batch, config.rounds, config.steps),
        "cluster": None,
    }
    for method in found.values():
        method.close()
    if (mesh := pj.data_mesh()).size == CALIBRATED:
        sizes = tuple(config.elements // 4**n for n in range(3))
        chosen = {"int8": codecs.named("int8")}
        fit = timing.calibrate(mesh, chosen, sizes, config.rounds)
        figures["cluster"] = timing.as_json(fit.cluster)
    if rank == 0:
        member.answer(figures, config.out)


def measured_efficiencies(
    answer: dict[str, Any] | None, seconds: float
) -> dict[str, list[float]] | None:
    """Returns lowest, median and highest efficiency over rounds of each method."""
    if answer is None:
        return None
    return {
        name: [
            seconds / step
            for step in (
                max(row["seconds"]),
                statistics.median(row["seconds"]),
                min(row["seconds"]),
            )
        ]
        for name, row in answer["methods"].items()
    }


def simulated(speeds: Any, hosts: int, method: Simulated, config: Config) -> float:
    """Returns the simulated efficiency of a method on this number of hosts."""
    calibrated = timing.from_json(speeds)
    many = dataclasses.replace(calibrated, hosts=hosts)
    codec = None if method.codec is None else codecs.named(method.codec)
    work = timing.Workload(
        config.seconds, config.elements, method.algorithm, codec, method.codec
    )
    if hosts == 1:
        return 1.0
    if method.width == 0:
        return asynchronous(many, work)
    return config.seconds / timing.simulate(many, work, method.width, steps=6).step_time


def asynchronous(many: timing.Cluster, work: timing.Workload, steps: int = 8) -> float:
    """Returns the efficiency of the slowest worker of a parameter server."""
    return steps * work.seconds / simulate_asynchronous(many, work, steps)[-1]


def table(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the table of efficiencies: measured, and simulated in brackets."""
    rows = [["hosts", *METHODS]]
    for cell in cells:
        measured = cell["measured"] or {}
        rows.append(
            [
                f"{cell['hosts']:,}",
                *(
                    (f"{measured[name][1]:.2f} " if name in measured else "")
                    + f"({cell['simulated'][name]:.2g})"
                    for name in METHODS
                ),
            ]
        )
    return rows


def picture(cells: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws efficiency over hosts: points are measured, and lines are simulated."""
    figure = new_figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    hosts = [cell["hosts"] for cell in cells]
    for name, method in METHODS.items():
        line = [cell["simulated"][name] for cell in cells]
        # Where two lines are one, both are seen.
        style = {"linestyle": "--", "zorder": 2.5} if method.codec else {"linewidth": 3}
        axes.plot(hosts, line, color=method.color, label=name, **style)
        points = [c for c in cells if c["measured"] and name in c["measured"]]
        axes.scatter(
            [c["hosts"] for c in points],
            [c["measured"][name][1] for c in points],
            color=method.color,
            marker="x" if method.codec else "o",
            s=35,
            zorder=3,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(hosts, [f"{n:,}" for n in hosts])
    axes.set(xlabel="hosts", ylabel="compute time / step time", ylim=(0, 1.05))
    axes.set_title("points: measured, lines: simulated", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center", bbox_to_anchor=(0.75, 0.25))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
