"""Compares compression at every level of a network with compression between hosts.

A reviewer of the Pipe-SGD paper asked whether every level must be compressed. Claim:
no, if each host has several devices. An all-reduce that compresses only between hosts
sends as few bytes over the slow links as one that compresses at both levels, has a
smaller error, and saves most of the time that compression can save. A flat all-reduce,
which does not know which devices share a host, sends more bytes over the slow links.

The gradients are real: they are those of an MLP on handwritten digits, one for each
device, in the middle of training. The error is that of the mean over devices,
`|got - exact| / |exact|`. The bytes are those that one host sends to others in an
all-reduce, and those that one device sends inside its host. Times are these bytes
divided by the speeds of the links: they are lower bounds, not measurements.

Command: python -m experiments.levels
Time: about 20 seconds on 2 cores.
Result: experiments/results/levels.json
"""

import dataclasses
import functools
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._internal.mesh import on_mesh
from pipejax._internal.ravel import ravel

from . import data, models, report, task

AXES = ("host", "device")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the network and of the gradients."""

    hosts: int = 4
    """Number of hosts."""
    devices: int = 2
    """Number of devices of each host."""
    slow: float = 1.25e9
    """Bytes per second that a host can send to others. Default: 10 Gbit/s Ethernet."""
    fast: float = 12e9
    """Bytes per second that a device can send inside its host. Default: PCIe."""
    steps: int = 100
    """Number of training steps before the gradients are taken."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the parameters and of the batches."""
    out: pathlib.Path = report.RESULTS / "levels.json"
    """File to write the result to, as JSON."""


Variants = dict[str, collectives.AllReduce]


def variants(codec: codecs.Codec) -> Variants:
    """Returns the all-reduces to compare, by the places where they use the codec."""
    exact, coded = collectives.two_shot(), collectives.two_shot(codec)
    return {
        "nowhere": collectives.hierarchical(exact, exact),
        "between hosts": collectives.hierarchical(exact, coded),
        "at both levels": collectives.hierarchical(coded, coded),
        "flat two-shot, at both ends": coded,
        "flat ring, at every hop": collectives.ring(codec),
    }


def main(config: Config) -> dict[str, Any]:
    """Sums real gradients in every way, prints the table, and writes the result."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", config.hosts * config.devices)
    mesh = pj.data_mesh(axis_name=AXES, hosts=config.hosts)
    rows = {}
    per_seed = [gradients(config, seed) for seed in config.seeds]
    for name, codec in {"int8": codecs.int8(), "int4": codecs.int4()}.items():
        for where, all_reduce in variants(codec).items():
            summed, transfers = summing(all_reduce, mesh, per_seed[0].shape[1])
            errors = [error(np.asarray(summed(g)), np.asarray(g)) for g in per_seed]
            between, inside = links(config, where, transfers)
            rows[f"{name}, {where}"] = {
                "error": statistics.mean(errors),
                "errors": errors,
                "bytes_between_hosts": between,
                "bytes_inside": inside,
                "seconds": between / config.slow + inside / config.fast,
            }
    report.save(
        config.out,
        **report.settings(config),
        rows=rows,
    )
    report.console(width=120).print(report.table("levels", table(rows)))
    return rows


def gradients(config: Config, seed: int) -> jax.Array:
    """Trains on digits, and returns the gradient of each device, [devices, n]."""
    dataset = data.load("digits")
    devices = config.hosts * config.devices
    batches = data.train_batches(dataset, batch_size=32 * devices, seed=seed)
    model = models.build("mlp", num_classes=dataset.num_classes)
    key = jax.random.key(seed)
    variables = model.init(key, jnp.zeros((1, *dataset.image_shape)), train=False)
    loss_fn = functools.partial(task.make_loss(model), rng=key)
    train = pj.make_train_step(
        lambda params, batch: loss_fn(params, batch)[0],
        optax.adamw(1e-3),
        mesh=pj.data_mesh(1),
        width=1,
    )
    state = train.init(variables["params"])
    for _ in range(config.steps):
        state, _ = train.step(state, next(batches))
    params = jax.device_get(state.params)
    rows = []
    batch = next(batches)
    for part in range(devices):
        own = jax.tree.map(lambda x, i=part: x[32 * i : 32 * (i + 1)], batch)
        found, _ = jax.grad(loss_fn, has_aux=True)(params, own)
        rows.append(ravel(jax.tree.leaves(found)))
    return jnp.stack(rows)


def summing(all_reduce: collectives.AllReduce, mesh: Any, n: int) -> Any:
    """Returns the sum as a program, and what each of its collectives moves."""
    layout = collectives.Layout.of_shapes(((n,),))
    transfers: list[collectives.Transfer] = []

    def local(row: jax.Array) -> jax.Array:
        stages = all_reduce(layout, AXES)
        transfers[:] = stages.transfers
        return collectives.run(stages, collectives.Summands((row[0],)))[0].coded[0]

    program = jax.jit(on_mesh(local, mesh, P(AXES), P()))
    jax.eval_shape(program, jax.ShapeDtypeStruct((mesh.size, n), jnp.float32))
    return program, transfers


def error(total: np.ndarray, rows: np.ndarray) -> float:
    """Returns the error relative to the exact sum of rows, in the Euclidean norm."""
    exact = rows.astype(np.float64).sum(axis=0)
    return float(np.linalg.norm(total - exact) / np.linalg.norm(exact))


def links(
    config: Config, where: str, transfers: list[collectives.Transfer]
) -> tuple[float, float]:
    """Returns the bytes that a host sends to others, and a device inside its host."""
    h, d = config.hosts, config.devices
    sent = [transfer.wire_bytes for transfer in transfers]
    if where.startswith("flat ring"):  # one device per host sends to the next host
        return sum(sent), sum(sent)
    if where.startswith("flat"):  # every device sends to every other
        away = h * d - d
        return d * sum(sent) * away / (h * d - 1), sum(sent) * (d - 1) / (h * d - 1)
    scatter, first, second, gather = sent
    return d * (first + second), scatter + gather


def table(rows: dict[str, Any]) -> list[list[str]]:
    """Returns the table of errors, bytes and times."""
    sizes = ["KB a host sends to others", "KB a device sends inside"]
    shown = [["compressed", "error", *sizes, "microseconds, at least"]]
    for name, row in rows.items():
        numbers = row["bytes_between_hosts"], row["bytes_inside"], 1e9 * row["seconds"]
        thousands = (f"{x / 1e3:.0f}" for x in numbers)
        shown.append([name, f"{row['error']:.4f}", *thousands])
    return shown


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
