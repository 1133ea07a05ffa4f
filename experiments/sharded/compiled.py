"""Compiles a sharded transformer for large clusters: what hides its exchange.

Claim: with a transformer of 1 and 7 billion parameters, which the GPUs of a host or the
chips of a TPU slice shard, at least 0.95 of the FLOPs lie under the exchange between
hosts or slices, apart from 1B with a sharded optimizer (0.94). In a synchronous step
(D-Sync), at most 0.01 do. The collectives inside a group are those of the synchronous
step, and as much compute lies under them, apart from 7B on v5e, where 0.04 less does.
The bar for the memory of a step of delay is 1.1 shards of the gradients, and 0.2 more
with prediction. On GPUs, predicted steps of 1B, steps with eight bits and those with a
sharded optimizer meet it.

The limit of the share is 1. A device sends its shards only: the bytes of the exchange
are those of the parameters divided by the devices of a group. With eight bits, they are
a quarter of that. Memory is `arguments + outputs + temporaries - aliased` of a device,
in shards of the parameters in float32, with AdamW and everything donated.

The programs are compiled from shapes, for devices that need not be there, and do not
run. Compute is in bfloat16, with one sequence of 2,048 tokens on each device.

Command: python -m experiments.sharded.compiled; with --sizes and --targets for some of
the cells, while the others stay as they are
Time: two minutes for each target with GPUs, and ten for each with TPUs, on 2 cores;
with eight bits, a program for TPUs takes longer than ten minutes
Result: experiments/results/sharded_compiled.json
"""

import dataclasses
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax.overlap import Report, difference_inside, inspect, topology

from .. import report
from . import model

TARGETS = (
    *("h100:1x4x8", "h100:1x32x8"),
    *("tpu:2xv5e:4x4", "tpu:4xv5e:4x4", "tpu:2xv5p:2x2x4"),
)
INT8 = collectives.two_shot(codecs.int8())
STEPS: dict[str, dict[str, Any]] = {
    "D-Sync": {"width": 1},
    "K=2, plain": {"width": 2, "weight_prediction": False},
    "K=2": {"width": 2, "weight_prediction": "own"},
    "K=2, int8": {"width": 2, "weight_prediction": "own", "all_reduce": INT8},
    "K=2, ZeRO-1": {"width": 2, "shard_optimizer": True},
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the programs to compile."""

    sizes: tuple[str, ...] = ("1B", "7B")
    """Sizes of the transformer, by their names in `experiments.sharded.model`."""
    targets: tuple[str, ...] = TARGETS
    """Devices to compile for, as `pj.overlap.topology` takes them."""
    steps: tuple[str, ...] = tuple(STEPS)
    """Steps to compile. The first must be the synchronous one. The result file keeps
    the cells of others."""
    out: pathlib.Path = report.RESULTS / "sharded_compiled.json"
    """File to write the result to, as JSON. It keeps the cells of other programs."""


def main(config: Config) -> int:
    """Compiles all programs, prints a line for each, and writes the result file.

    Returns:
      The exit code, which is 1 if a program misses its bar.
    """
    jax.config.update("jax_platforms", "cpu")
    wanted = [(size, target) for size in config.sizes for target in config.targets]
    cells = [
        cell
        for cell in report.kept(config.out)
        if (cell["size"], cell["target"]) not in wanted
        or cell["step"] not in config.steps
    ]
    for size, target in wanted:
        cells += compiled(size, target, config.steps)
        report.save(config.out, seed=0, cells=sorted(cells, key=place))
    cells = sorted(cells, key=place)
    print()
    report.console(width=140).print(report.table("sharded models", rows(cells)))
    return int(not all(cell["met"] for cell in cells))


def place(cell: dict[str, Any]) -> tuple[int, ...]:
    """Returns the place of a cell in the table: by size, devices and step."""
    orders = {"size": tuple(model.SIZES), "target": TARGETS, "step": tuple(STEPS)}
    return tuple(
        order.index(cell[name]) if cell[name] in order else len(order)
        for name, order in orders.items()
    )


def compiled(size: str, target: str, steps: tuple[str, ...]) -> list[dict[str, Any]]:
    """Compiles all steps of one size for one target."""
    mesh = mesh_of(target)
    twin: Report | None = None
    cells = []
    for step in steps:
        try:
            found, elements = inspected(size, mesh, STEPS[step])
        except jax.errors.JaxRuntimeError as error:
            why = str(error).splitlines()[0]
            cells.append(failed(size, target, step, why))
            print(f"{size} on {target}, {step}: {why}", flush=True)
            continue
        twin = found if twin is None else twin
        cells.append(cell_of(size, target, step, mesh, elements, twin, found))
        print(line(cells[-1]), flush=True)
    return cells


def mesh_of(target: str) -> Mesh:
    """Returns a mesh of groups: hosts with their GPUs, or slices with their chips."""
    return pj.data_mesh(devices=topology(target), axis_name=("host", "fsdp"))


def inspected(size: str, mesh: Mesh, options: dict[str, Any]) -> tuple[Report, int]:
    """Compiles one step; returns its report and the number of parameters."""
    config = model.SIZES[size]
    graph, params = nnx.eval_shape(lambda: model.init(config))
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        params,
        model.shardings(params, mesh),
    )
    train = pj.make_train_step(
        model.loss_fn(graph),
        optax.adamw(1e-3),
        mesh=mesh,
        axis_name="host",
        donate=True,
        compute_dtype=jnp.bfloat16,
        **options,
    )
    tokens = jax.ShapeDtypeStruct(
        (mesh.size, config.context + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, P(("host", "fsdp"))),
    )
    found = inspect(train, train.abstract_state(params), tokens)
    return found, sum(x.size for x in jax.tree.leaves(params))


def cell_of(
    size: str,
    target: str,
    step: str,
    mesh: Mesh,
    elements: int,
    twin: Report,
    found: Report,
) -> dict[str, Any]:
    """Returns the figures of one program, and whether it meets its bars."""
    shard = 4 * elements / mesh.shape["fsdp"]
    before, after = (x.memory and x.memory.live / shard for x in (twin, found))
    inside = difference_inside(twin, found, "host")
    between = found.covered_by.get(("host",), 0.0)
    fsdp = [x.covered_by.get(("fsdp",), 0.0) for x in (twin, found)]
    more = None if before is None or after is None else after - before
    bar = 1.1 if "plain" in step else 1.3
    sent = sum(c.times * c.wire_bytes for c in found.collectives if c.axes == ("host",))
    checks = {
        "between": between >= 0.95,
        "inside": all(each.alike for each in inside) and fsdp[1] >= fsdp[0] - 0.01,
        "memory": more is None or more <= bar,
    }
    return {
        "size": size,
        "target": target,
        "step": step,
        **report.origin(),
        "groups": mesh.shape["host"],
        "devices": mesh.shape["fsdp"],
        "elements": elements,
        "covered_between": between,
        "covered_inside": fsdp[1],
        "sent_between": sent,
        "shard": shard,
        "memory": after,
        "more_memory": more,
        "inside": [str(each) for each in inside],
        "checks": checks,
        "met": step == "D-Sync" or all(checks.values()),
        "report": {k: v for k, v in found.to_dict().items() if k != "collectives"},
    }


def failed(size: str, target: str, step: str, why: str) -> dict[str, Any]:
    """Returns the cell of a program that the compiler refuses."""
    cell = {"size": size, "target": target, "step": step, **report.origin()}
    return {**cell, "refused": why, "met": False}


def line(cell: dict[str, Any]) -> str:
    """Returns one line on a program."""
    missed = [name for name, met in cell["checks"].items() if not met]
    verdict = f"; MISSED {', '.join(missed)}" if missed and not cell["met"] else ""
    return (
        f"{cell['size']} on {cell['target']}, {cell['step']}: between groups"
        f" {cell['covered_between']:.2f}, inside {cell['covered_inside']:.2f},"
        f" sent {cell['sent_between'] / cell['shard']:.2f} shards,"
        f" memory {cell['memory'] or 0:.2f} shards{verdict}"
    )


def rows(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns titles, then a row for each program."""
    titles = ["model", "devices", "step", "FLOPs under the exchange between groups"]
    titles += ["FLOPs under collectives inside"]
    titles += ["MB that each device sends to other groups"]
    titles += ["memory, in shards", "more than D-Sync"]
    found = [titles]
    for cell in cells:
        start = [cell["size"], cell["target"], cell["step"]]
        if "refused" in cell:
            found.append([*start, "refused", "", "", "", ""])
            continue
        more = cell["more_memory"]
        found.append(
            [
                *start,
                f"{cell['covered_between']:.2f}",
                f"{cell['covered_inside']:.2f}",
                f"{cell['sent_between'] / 1e6:,.0f}",
                "" if cell["memory"] is None else f"{cell['memory']:.2f}",
                "" if more is None or cell["step"] == "D-Sync" else f"{more:.2f}",
            ]
        )
    return found


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
