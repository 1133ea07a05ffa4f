r"""Times a sharded transformer on emulated hosts, each with two CPU devices.

Claim: a pipelined step takes at most 1.10 times the longer of its compute and its
exchange, where a synchronous step takes their sum. Each host shards the model over its
two devices (FSDP), and exchanges its shards with the other hosts over real TCP.

The compute is that of a host alone, with its collectives inside. The exchange is an
all-reduce of gradients alone, leaf by leaf, between the devices with the same shards.
Its limit is the time that the bytes of one host take on its link, which is printed as
`wire`. The hosts share the cores of the machine: a step takes at least the time for
which the cores worked, `cores`. All methods take turns in every round.

Command: python -m experiments.sharded.cluster
Time: about 5 minutes for each number of hosts, on 2 cores.
Result: experiments/results/sharded_cluster.json
"""

import dataclasses
import functools
import pathlib
import statistics
from typing import Any

import jax
import numpy as np
import optax
import tyro
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives

from .. import cluster, report, side_by_side
from ..cluster import member
from ..methods import Method
from . import model

DEVICES = 2  # of each host
STEPS: dict[str, dict[str, Any]] = {
    "D-Sync": {"width": 1},
    "Pipe-SGD": {"width": 2},
    "Pipe-SGD, int8": {
        "width": 2,
        "all_reduce": collectives.two_shot(codecs.error_feedback(codecs.int8())),
    },
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    hosts: tuple[int, ...] = (2, 4)
    """Numbers of hosts to emulate."""
    rate: str = "500mbit"
    """Rate of the link of each host, in each direction."""
    size: str = "10M"
    """Size of the transformer, by its name in `experiments.sharded.model`."""
    sequences: int = 2
    """Number of sequences of each device."""
    length: int = 64
    """Number of tokens of a sequence that are predicted."""
    rounds: int = 5
    """Number of rounds. In each round, every method takes its turn."""
    steps: int = 2
    """Number of timed steps in a turn."""
    on_host: bool = False
    """Measure on this host of a cluster. The program calls itself with this flag."""
    out: pathlib.Path = report.RESULTS / "sharded_cluster.json"
    """File to write the result to, as JSON."""


class Sharded(Method):
    """A train step of a sharded transformer, on one group for each host."""

    def __init__(self, config: Config, options: dict[str, Any]) -> None:
        self.mesh = pj.data_mesh(axis_name=("host", "fsdp"))
        graph, params = model.init(model.SIZES[config.size])
        self.params_there = jax.tree.map(
            jax.device_put, params, model.shardings(params, self.mesh)
        )
        self.train = pj.make_train_step(
            model.loss_fn(graph),
            optax.adamw(1e-3),
            mesh=self.mesh,
            axis_name="host",
            donate=True,
            **options,
        )
        self.width = self.train.width
        self.state = self.train.init(self.params_there)

    def step(self, batch: Any) -> None:
        """Dispatches a step on this host's tokens."""
        given = self.train.batch(batch, axis_name=("host", "fsdp"))
        self.state, _ = self.train.step(self.state, given)

    def wait(self) -> None:
        """Waits until the state has been computed; reductions in flight continue."""
        jax.block_until_ready(self.state)

    def finish(self) -> None:
        """Drains the pipeline."""
        self.state, _ = jax.block_until_ready(self.train.drain(self.state))

    def params(self) -> Any:
        """Returns the parameters, as arrays of all hosts."""
        return self.state.params


class Exchange(Method):
    """The exchange alone: gradients are summed leaf by leaf over the hosts."""

    def __init__(self, of: Sharded) -> None:
        specs = jax.tree.map(lambda x: x.sharding.spec, of.params_there)
        place = functools.partial(jax.shard_map, mesh=of.mesh, check_vma=False)

        def summed(tree: Any) -> Any:
            return jax.tree.map(lambda x: lax.psum(x, "host"), tree)

        self.program = jax.jit(place(summed, in_specs=(specs,), out_specs=specs))
        self.given, self.sums = of.params_there, None

    def step(self, batch: Any) -> None:
        """Starts an exchange."""
        del batch
        self.sums = self.program(self.given)

    def wait(self) -> None:
        """Waits for the sums."""
        jax.block_until_ready(self.sums)

    def params(self) -> Any:
        """Returns the sums."""
        return self.sums


def main(config: Config) -> None:
    """Measures on every cluster, prints the table, and writes the result."""
    if config.on_host:
        measure(config)
        return
    cells = []
    for hosts in config.hosts:
        print(f"{hosts} hosts", flush=True)
        found = cluster.ask(
            cluster.Network.of(hosts, (config.rate,)),
            "experiments.sharded.cluster",
            [
                *("--on-host", "--size", config.size, "--rate", config.rate),
                *("--sequences", str(config.sequences), "--length", str(config.length)),
                *("--rounds", str(config.rounds), "--steps", str(config.steps)),
            ],
        )
        cells.append({"hosts": hosts, **report.origin(), **found})
    settings = report.settings(config)
    del settings["on_host"]
    report.save(config.out, **{"seed": 0, **settings}, cells=cells)
    report.console(width=140).print(report.table("sharded", rows(cells, config.rate)))


def measure(config: Config) -> None:
    """Times every method together with other hosts; the first host answers."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rank = member.join()
    batch = tokens(config, rank)
    found: dict[str, Method] = {"compute": Alone(config)}
    steps = {name: Sharded(config, options) for name, options in STEPS.items()}
    found |= {**steps, "exchange": Exchange(steps["D-Sync"])}
    figures = {
        "elements": sum(x.size for x in jax.tree.leaves(found["compute"].params())),
        "methods": side_by_side.timed(found, batch, config.rounds, config.steps),
    }
    for method in found.values():
        method.close()
    if rank == 0:
        member.answer(figures, config.out)


class Alone(Method):
    """A step by hand on this host alone, which exchanges nothing with others."""

    def __init__(self, config: Config) -> None:
        self.mesh = pj.data_mesh(
            devices=jax.local_devices(), axis_name=("host", "fsdp"), hosts=1
        )
        graph, params = model.init(model.SIZES[config.size])
        places = model.shardings(params, self.mesh)
        loss_fn, tx = model.loss_fn(graph), optax.adamw(1e-3)

        def step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
            gradients = jax.grad(loss_fn)(params, tokens)
            gradients = jax.lax.with_sharding_constraint(gradients, places)
            updates, opt_state = tx.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        with jax.set_mesh(self.mesh):
            params = jax.tree.map(jax.device_put, params, places)
            self.state = params, tx.init(params)
        self.program = jax.jit(step, donate_argnums=(0, 1))

    def step(self, batch: Any) -> None:
        """Dispatches a step on this host's tokens."""
        place = NamedSharding(self.mesh, P(("host", "fsdp")))
        with jax.set_mesh(self.mesh):
            self.state = self.program(*self.state, jax.device_put(batch, place))

    def wait(self) -> None:
        """Waits until the state has been computed."""
        jax.block_until_ready(self.state)

    def params(self) -> Any:
        """Returns the parameters of this host."""
        return self.state[0]


def tokens(config: Config, rank: int) -> np.ndarray:
    """Returns random tokens of one host, [sequences of a host, length + 1]."""
    rng = np.random.default_rng(rank)
    shape = (config.sequences * DEVICES, config.length + 1)
    vocabulary = model.SIZES[config.size].vocabulary
    return rng.integers(vocabulary, size=shape).astype(np.int32)


def rows(cells: list[dict[str, Any]], rate: str) -> list[list[str]]:
    """Returns titles, then a row for each method and number of hosts."""
    titles = ["hosts", "method", "ms a step", "over its compute"]
    titles += ["over the longer of compute and exchange", "wire, ms", "cores, ms"]
    found = [titles]
    link = cluster.bits_per_second(rate) / 8
    for cell in cells:
        medians = {
            k: statistics.median(x["seconds"]) for k, x in cell["methods"].items()
        }
        longer = max(medians["compute"], medians["exchange"])
        for name, seconds in medians.items():
            sent = cell["methods"][name]["wire_bytes"]
            cores = statistics.median(cell["methods"][name]["cores"])
            found.append(
                [
                    str(cell["hosts"]),
                    name,
                    f"{1e3 * seconds:.0f}",
                    f"{seconds / medians['compute']:.2f}",
                    f"{seconds / longer:.2f}",
                    f"{1e3 * sent / link:.0f}",
                    f"{1e3 * cores:.0f}",
                ]
            )
    return found


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
