"""Compiles local steps of transformers for large clusters: what hides a chunk.

Claim: in a step that exchanges a chunk, the collectives of the chunk together have at
least 0.95 of the FLOPs beside them. The collectives inside a group send the bytes of a
step without a chunk, and of a step by hand in one group, and have as many FLOPs beside
them. The bar for the memory of a step with a chunk is 2.1 copies of the parameters more
than the step by hand, and `2 + 1/p + 0.1` with outer momentum, on p groups. Only the
mean without a codec meets it everywhere. Nesterov momentum does in 4 groups that shard
the model, and eight bits with error feedback in all groups that do.

A group is one device, which holds a transformer of 124 million parameters, or the eight
GPUs of a host, which shard one of a billion (FSDP).

Memory is `arguments + outputs + temporaries - aliased` of a device with everything
donated, and what the caller holds during the step: the chunks of the anchor, of the
outer optimizer and of the codec that the step does not exchange. It is given in copies
of the parameters, or of a device's shards of them, in float32. The program does not
depend on the number of steps H of a round, which is checked for H = V and H = 4 V.

The share of FLOPs beside a chunk counts each FLOP once. That of the collectives inside
a group is their mean, weighted by the bytes they send.

The programs are compiled from shapes, for devices that need not be there, and do not
run. Compute is in bfloat16, with one sequence on each device.

Command: python -m experiments.local_steps.compiled
Time: about 12 minutes on 2 cores.
Result: experiments/results/local_steps_compiled.json
"""

import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from experiments import report
from experiments.sharded import model
from pipejax.codecs import error_feedback, int8
from pipejax.collectives import two_shot
from pipejax.overlap import Report, difference_inside, inspect, topology

CHUNKS = 16
TX = optax.adamw(1e-3)
STEPS: dict[str, dict[str, Any]] = {
    "no chunk": {"overlap_steps": 0},
    "mean": {},
    "Nesterov": {"outer_tx": optax.sgd(0.7, momentum=0.9, nesterov=True)},
    "mean, int8": {"all_reduce": two_shot(error_feedback(int8()))},
}
CELLS = (
    *("124M on h100:1x4x8", "124M on h100:1x32x8"),
    *("1B in groups on h100:1x4x8", "1B in groups on h100:1x32x8"),
)


class Task(NamedTuple):
    """A model and its batch, as shapes on a mesh of groups."""

    mesh: Mesh
    loss: Any
    params: Any
    tokens: jax.ShapeDtypeStruct

    @property
    def copy(self) -> float:
        """Returns the bytes of the parameters that a device holds."""
        size = sum(4 * x.size for x in jax.tree.leaves(self.params))
        return size / (self.mesh.size // self.mesh.shape["host"])


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the programs to compile."""

    cells: tuple[str, ...] = CELLS
    """Models and devices: a size in `experiments.sharded.model`, then "in groups" if
    each host is a group that shards the model, and a target of `pj.overlap.topology`.
    """
    steps: tuple[str, ...] = tuple(STEPS)
    """Steps to compile. The first must be the one without a chunk."""
    out: pathlib.Path = report.RESULTS / "local_steps_compiled.json"
    """File to write the result to, as JSON. It keeps the cells of other models."""


def main(config: Config) -> int:
    """Compiles all programs, prints a line for each, and writes the result file.

    Returns:
      The exit code, which is 1 if a program misses a bar.
    """
    jax.config.update("jax_platforms", "cpu")
    cells = [c for c in report.kept(config.out) if c["model"] not in config.cells]
    for name in config.cells:
        for cell in compiled(name, config.steps):
            cells = sorted([*cells, cell], key=place)
            print(*rows([cell])[1], cell["checks"], sep=", ", flush=True)
            report.save(config.out, seed=0, chunks=CHUNKS, cells=cells)
    report.console(width=140).print(report.table("local steps", rows(cells)))
    return int(not all(all(cell["checks"].values()) for cell in cells))


def place(cell: dict[str, Any]) -> int:
    """Returns the place of a cell in the table: by model and devices."""
    return CELLS.index(cell["model"]) if cell["model"] in CELLS else len(CELLS)


def compiled(name: str, steps: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Compiles all steps of one model for one target."""
    size, *groups, _, target = name.split(" ")
    names = ("host", "fsdp") if groups else "host"
    mesh = pj.data_mesh(devices=topology(target), axis_name=names)
    task = task_on(mesh, size)
    hand = by_hand(task_on(one_group(mesh), size))
    twin: Report | None = None
    for step in steps:
        found, held = local_step(task, STEPS[step])
        twin = found if twin is None else twin
        cell = {"model": name, "step": step, "groups": mesh.shape["host"]}
        yield {**cell, **figures(task, step, hand, twin, found, held)}


def task_on(mesh: Mesh, size: str) -> Task:
    """Returns the shapes of a transformer and of its batch on a mesh."""
    config = model.SIZES[size]
    graph, params = nnx.eval_shape(lambda: model.init(config))
    params = jax.tree.map(on, params, model.shardings(params, mesh))
    tokens = jax.ShapeDtypeStruct((mesh.size, config.context + 1), jnp.int32)
    rows = NamedSharding(mesh, P(mesh.axis_names))
    return Task(mesh, model.loss_fn(graph), params, on(tokens, rows))


def on(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array that lies on a mesh."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def one_group(mesh: Mesh) -> Mesh:
    """Returns a mesh of the first group, as a plain program would have it."""
    return Mesh(mesh.devices[:1], mesh.axis_names, axis_types=mesh.axis_types)


def by_hand(task: Task) -> Report:
    """Compiles a step of one group without pipejax."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return task.loss(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), tokens)

    def step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    places = jax.tree.map(lambda x: x.sharding, task.params)
    opt_state = optax.tree_map_params(
        TX,
        on,
        jax.eval_shape(TX.init, task.params),
        places,
        transform_non_params=lambda x: on(x, NamedSharding(task.mesh, P())),
    )
    program = jax.jit(step, donate_argnums=(0, 1))
    options = pj.compiler_options(task.mesh)
    with jax.set_mesh(task.mesh):
        args = task.params, opt_state, task.tokens
        return inspect(program, *args, compiler_options=options, mesh=task.mesh)


def local_step(task: Task, options: dict[str, Any]) -> tuple[Report, int]:
    """Compiles a local step; also returns the bytes that its caller holds beside it.

    Raises:
      ValueError: If the program depends on the number of steps of a round.
    """

    def lowered(every: int) -> tuple[Any, Any]:
        train = pj.make_local_step(
            task.loss,
            TX,
            mesh=task.mesh,
            axis_name="host",
            donate=True,
            compute_dtype=jnp.bfloat16,
            **{"sync_every": every, "overlap_steps": CHUNKS, **options},
        )
        state = train.abstract_state(task.params)
        return state, train.lower(state, task.tokens)

    state, program = lowered(CHUNKS)
    if program.as_text() != lowered(4 * CHUNKS)[1].as_text():
        raise ValueError("a step of a longer round has another program")
    found = inspect(program.compile(), mesh=task.mesh)
    exchanged = options.get("overlap_steps", CHUNKS) > 0
    chunks = state.shared.anchor, state.shared.outer, state.own.codec_states
    return found, held(chunks, 1 if exchanged else 0)


def held(chunks: tuple[Any, ...], used: int) -> int:
    """Returns the bytes on a device of all chunks but the first `used`."""
    rest = jax.tree.leaves([each[used:] for each in chunks])
    return sum(
        x.dtype.itemsize * int(jnp.prod(jnp.array(x.sharding.shard_shape(x.shape))))
        for x in rest
    )


def figures(
    task: Task, step: str, hand: Report, twin: Report, found: Report, held: int
) -> dict[str, Any]:
    """Returns the figures of one program, and whether it meets its bars."""
    assert found.memory is not None
    assert hand.memory is not None
    copies = [x / task.copy for x in (found.memory.live + held, hand.memory.live)]
    groups = task.mesh.shape["host"]
    bar = 2.1 + (1 / groups if step == "Nesterov" else 0)
    inside = difference_inside(twin, found, "host")
    shares = [x.share_by.get(("fsdp",)) for x in (hand, twin, found)]
    beside = found.covered_by.get(("host",))
    least = max((x for x in shares[:2] if x is not None), default=0.0)
    return {
        "beside_chunk": beside,
        "inside_by_hand": shares[0],
        "inside_twin": shares[1],
        "inside": shares[2],
        "sent": sum(c.wire_bytes for c in found.collectives if c.axes == ("host",)),
        "copy": task.copy,
        "memory_by_hand": copies[1],
        "memory": copies[0],
        "more_memory": copies[0] - copies[1],
        "bar": bar,
        "collectives_inside": [str(each) for each in inside],
        "checks": {
            "chunk": beside is None or beside >= 0.95,
            "inside": all(each.alike for each in inside)
            and (shares[2] or 0) >= least - 0.001,
            "memory": copies[0] - copies[1] <= bar,
        },
        "report": {k: v for k, v in found.to_dict().items() if k != "collectives"},
        **report.origin(),
    }


def rows(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns titles, then a row for each program."""
    titles = ["model", "groups", "step", "FLOPs beside the chunk"]
    titles += ["FLOPs beside collectives inside", "by hand"]
    titles += ["MB that each device sends to other groups"]
    titles += ["memory, in copies", "more than by hand", "bar"]
    found = [titles]
    for cell in cells:
        chunk = cell["beside_chunk"] is not None
        found.append(
            [
                cell["model"],
                str(cell["groups"]),
                cell["step"],
                shown(cell["beside_chunk"], 2),
                shown(cell["inside"], 3),
                shown(cell["inside_by_hand"], 3),
                f"{cell['sent'] / 1e6:,.1f}" if chunk else "",
                f"{cell['memory']:.2f}",
                f"{cell['more_memory']:.2f}",
                f"{cell['bar']:.2f}" if chunk else "",
            ]
        )
    return found


def shown(value: float | None, digits: int) -> str:
    """Returns a share as text, or nothing if there is none."""
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
