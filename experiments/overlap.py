"""Measures how much of a step's compute XLA schedules under its all-reduce, on GPUs.

Claim: with the defaults of `pj.make_train_step(width=2)`, at least 0.95 of the FLOPs of
matmuls and convolutions lie between the start and the end of the all-reduce. For the
smallest model, the MLP for MNIST, the share is at least 0.90. The claim holds for 8, 64
and 256 devices, on A100, H100, H200 and B200. With the 8-bit two-shot exchange, both
collectives run beside compute, and at least 0.85 of the FLOPs lie under one of them. A
step with all that pipejax offers at once (batch norm, AdamW, clipping, microbatches,
metrics) has at least 0.95 of its FLOPs under its collectives. The limit is always 1.
On 64 H100, two more programs keep the bar of a pipeline of width 2, and a third has at
least 0.70 of its FLOPs (the MLP 0.30) under the collectives between hosts, which take
longest:

- Two levels: `hierarchical` on eight hosts, whose devices predict by their mean.
- Least delay: what `pj.overlap.least_delay` chooses if the exchange takes as long as
  the compute. The result says which share of the bytes is delayed.
- At once: the part of rank 8 of every gradient is exchanged in its own step.

The result also has other programs to compare with:

- D-Sync by pipejax, and D-Sync by hand with one `pmean` per leaf. The latter is
  compiled with the compiler options of pipejax, and with the defaults of XLA.
- A straightforward pipeline: one `pmean` per leaf of the stale gradient, with the
  defaults of XLA.
- A negative control, whose all-reduce has nothing to hide behind: it sums and applies
  the stale gradient before it computes the next. Less than half of its FLOPs must be
  covered, or the measure says nothing.

TPUs have no bar. The programs are compiled from shapes, for devices that need not be
there, and do not run. The experiment reads their schedules, not times.

Command: python -m experiments.overlap; with --tpu for TPUs; with --targets, --models or
--programs for some of the cells, while the others stay as they are
Time: about half an hour on 2 cores with JAX 0.10, an hour with JAX 0.12; 10 minutes
with --tpu, 2 minutes with --small.
Result: experiments/results/overlap.json, experiments/results/overlap_tpu.json
"""

import dataclasses
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.sharding import Mesh
from rich.table import Table
from rich.text import Text

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._core.message import at_width_1
from pipejax.overlap import Report, inspect, least_delay, topology

from . import by_hand, models, report, task, transformer

Model = Literal[
    "mlp", "cnn", "resnet18", "transformer", "transformer scan", "small leaves"
]
Program = Literal[
    "pipelined",
    "D-Sync",
    "D-Sync by hand",
    "D-Sync by hand, defaults",
    "naive, defaults",
    "negative control",
    "two-shot",
    "everything",
    "least delay",
    "at once",
    "two levels",
]
GPUS = tuple(
    f"{gpu}:{shape}"
    for gpu in ("a100", "h100", "h200", "b200")
    for shape in ("1x1x8", "1x8x8", "1x32x8")
)
TPUS = ("tpu:v5e:2x4", "tpu:v5p:2x2x2", "tpu:v6e:2x4", "tpu:tpu7x:2x2x2")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the matrix. Each cell is one program."""

    targets: tuple[str, ...] = GPUS
    """Devices to compile for, as `pj.overlap.topology` takes them."""
    models: tuple[Model, ...] = get_args(Model)
    """Models to compile: mlp on images of MNIST's shape, cnn and resnet18 on images of
    CIFAR-10's shape, transformers on 256 bytes of text, and an MLP of 300 small
    leaves."""
    programs: tuple[Program, ...] = get_args(Program)
    """Programs to compile. On TPUs, only the first two are compiled. "everything" is
    compiled only for resnet18, the last three only for 64 H100."""
    small: bool = False
    """Compile three models and four programs for 8 and 64 H100 GPUs. The flags for
    targets, models and programs then have no effect."""
    tpu: bool = False
    """Compile for TPUs in place of the targets, and write another result file."""
    out: pathlib.Path | None = None
    """File to write the result to, as JSON. By default one of the two files above."""


SMALL: dict[str, Any] = {
    "targets": ("h100:1x1x8", "h100:1x8x8"),
    "models": ("mlp", "cnn", "transformer scan"),
    "programs": ("pipelined", "D-Sync", "negative control", "two-shot"),
}
# The shape of an image, and the number of images per device.
IMAGES = {
    "mlp": ((28, 28, 1), 256),
    "cnn": ((32, 32, 3), 64),
    "resnet18": ((32, 32, 3), 32),
}
SEQUENCES = 8
ALL_REDUCES = {
    "two-shot": collectives.two_shot(codecs.int8()),
    "two levels": collectives.hierarchical(),
}
SGD = optax.sgd(0.1, momentum=0.9)


class Problem(NamedTuple):
    """A loss, and the shapes of its arguments and of the arguments of `init`."""

    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    extra: dict[str, Any]


def main(config: Config) -> int:
    """Compiles every cell, prints a table, and writes the result file.

    Returns:
      The exit code, which is 1 if a cell misses its bar. These cells are printed to
      stderr.
    """
    if config.small:
        config = dataclasses.replace(config, **SMALL)
    if config.tpu:
        config = dataclasses.replace(config, targets=TPUS)
    default = "overlap_tpu.json" if config.tpu else "overlap.json"
    out = config.out or report.RESULTS / default
    found: dict[Names, dict[str, Any]] = {
        (cell["target"], cell["model"], cell["program"]): cell
        for cell in report.kept(out)
    }
    origin = report.origin()
    for target in config.targets:
        for model, program in itertools.product(config.models, config.programs):
            names = target, model, program
            if applies(*names):
                found[names] = {**origin, **measured(*names)}
                print(_line(found[names]), flush=True)
        cells = in_order(found)
        report.save(out, seed=0, limit=1.0, cells=cells)
    show(cells)
    missed = [cell for cell in cells if not cell["met"]]
    for cell in missed:
        print(_line(cell), file=sys.stderr)
    return int(bool(missed))


Names = tuple[str, Model, Program]  # of a cell: its target, its model, its program


def in_order(found: dict[Names, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the cells in the order of the tables."""
    targets = dict.fromkeys((*GPUS, *TPUS, *(target for target, _, _ in found)))
    grid = itertools.product(targets, get_args(Model), get_args(Program))
    return [found[names] for names in grid if names in found]


def applies(target: str, model: Model, program: Program) -> bool:
    """Returns whether the matrix has this cell."""
    if target.startswith("tpu"):
        return program in ("pipelined", "D-Sync")
    if program in ("least delay", "at once", "two levels"):
        return target == "h100:1x8x8"
    return program != "everything" or model == "resnet18"


def axes_of(program: Program) -> str | tuple[str, str]:
    """Returns the mesh axes of the data."""
    return ("host", "device") if program == "two levels" else "data"


def measured(target: str, model: Model, program: Program) -> dict[str, Any]:
    """Compiles one cell; returns the figures, and whether they meet the bar."""
    names = {"target": target, "model": model, "program": program}
    axes = axes_of(program)
    mesh = pj.data_mesh(devices=topology(target), axis_name=axes)
    delayed = {}
    if program == "least delay":
        delayed["delayed"] = share_of(least(model, mesh), plain_problem(model, 1))
    try:
        found = compiled(program, model, mesh)
    except jax.errors.JaxRuntimeError as error:
        return {**names, "failed": str(error).splitlines()[0], "met": False}
    bar, met = judged(found, program, model)
    no_bar = target.startswith("tpu")
    return {
        **names,
        **delayed,
        "covered": found.covered,
        "between_hosts": found.covered_by.get(("host",)),
        "share": found.share,
        "bar": "none" if no_bar else bar,
        "met": no_bar or met,
        "matmuls": found.matmuls,
        "flops": found.flops,
        "collectives": len(found.collectives),
        "kinds": [c.kind for c in found.collectives],
        "asynchronous": [c.asynchronous for c in found.collectives],
        "bytes": [c.bytes for c in found.collectives],
        "wire_bytes": [c.wire_bytes for c in found.collectives],
        "uncounted": list(found.uncounted),
    }


def judged(found: Report, program: Program, model: Model) -> tuple[str, bool]:
    """Returns the bar of a program in words, and whether the report meets it."""
    covered = found.covered or 0.0
    everywhere = bool(found.collectives) and all(
        c.asynchronous for c in found.collectives
    )
    if program in ("pipelined", "least delay", "at once"):
        least = 0.90 if model == "mlp" else 0.95
        return f"at least {least:.2f}", covered >= least
    if program == "two levels":
        least = 0.30 if model == "mlp" else 0.70  # it has few operations
        between = found.covered_by.get(("host",), 0.0)
        return f"at least {least:.2f} between hosts", between >= least
    if program == "two-shot":
        return "at least 0.85, all asynchronous", covered >= 0.85 and everywhere
    if program == "everything":
        return "at least 0.95", covered >= 0.95
    if program == "negative control":
        return "less than 0.50", covered < 0.5
    return "none", True


def compiled(program: Program, model: Model, mesh: Mesh) -> Report:
    """Compiles one program, and returns the report on its schedule."""
    full = program == "everything"
    problem = full_problem(mesh.size) if full else plain_problem(model, mesh.size)
    part = codecs.power_sgd(8, jax.random.key(0))
    train = pj.make_train_step(
        problem.loss_fn,
        task.make_optimizer("adamw", 1e-3, 0.1, clip_norm=1.0) if full else SGD,
        mesh=mesh,
        axis_name=axes_of(program),
        microbatches=2 if full else 1,
        all_reduce=ALL_REDUCES.get(program, collectives.psum()),
        delayed=least(model, mesh) if program == "least delay" else None,
        at_once=part if program == "at once" else None,
    )
    init = functools.partial(train.init, batch=problem.batch)
    state = jax.eval_shape(init, problem.params, **problem.extra)
    (stale,) = state.in_flight.pending
    look: Callable[..., Report] = functools.partial(inspect, train, state)
    if program == "D-Sync":
        empty = state._replace(in_flight=at_width_1(state.in_flight))
        look = functools.partial(inspect, train.plain, empty)
    elif program == "negative control":
        step = by_hand.applied_first(problem.loss_fn, SGD, mesh)
        own = stale.gradients
        look = functools.partial(inspect, step, state.params, state.opt_state, own)
    elif program == "naive, defaults":
        step = by_hand.naive(problem.loss_fn, SGD, mesh)
        own = jax.tree.map(lambda x: on_each(mesh.size, x), state.params)
        look = functools.partial(inspect, step, state.params, state.opt_state, own)
    elif program.startswith("D-Sync by hand"):
        step = by_hand.synchronous(problem.loss_fn, SGD, mesh)
        look = functools.partial(inspect, step, state.params, state.opt_state)
    given = train.plain if program.startswith("D-Sync") else train
    options = {} if program.endswith("defaults") else given.compiler_options
    return look(problem.batch, compiler_options=options)


def least(model: Model, mesh: Mesh) -> Any:
    """Returns what must be delayed if the exchange takes as long as the compute."""
    problem = plain_problem(model, mesh.size)
    train = pj.make_train_step(problem.loss_fn, SGD, mesh=mesh)
    state = train.abstract_state(problem.params)
    return least_delay(train, state, problem.batch, compute=1.0, exchange=1.0)


def share_of(delayed: Any, problem: Problem) -> float:
    """Returns the share of the parameters whose gradients are delayed."""
    sizes = [leaf.size for leaf in jax.tree.leaves(problem.params)]
    flags = jax.tree.leaves(delayed)
    late = sum(size for size, flag in zip(sizes, flags, strict=True) if flag)
    return late / sum(sizes)


def on_each(devices: int, leaf: Any) -> Any:
    """Returns the shape of an array that has one such leaf on each device."""
    return jax.ShapeDtypeStruct((devices * leaf.shape[0], *leaf.shape[1:]), leaf.dtype)


def plain_problem(model: Model, devices: int) -> Problem:
    """Returns the loss of a model, without state, key or metrics."""
    if model.startswith("transformer"):
        config = transformer.Config(scan=model == "transformer scan")
        init = functools.partial(transformer.init, config=config)
        params = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))
        shape = (SEQUENCES * devices, config.context + 1)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        return Problem(transformer.loss_fn(config), params, tokens, {})
    if model == "small leaves":
        return small_leaves(300, devices)
    net, variables, batch = images(model, devices)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = net.apply({"params": params}, batch["image"], train=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean()

    return Problem(loss_fn, variables["params"], batch, {})


def small_leaves(count: int, devices: int) -> Problem:
    """Makes a residual MLP of `count` leaves, of 64 x 64 and of 64 in turn."""
    params = [
        jax.ShapeDtypeStruct((64, 64) if i % 2 == 0 else (64,), jnp.float32)
        for i in range(count)
    ]

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        x = batch
        for w, b in zip(params[::2], params[1::2], strict=True):
            x = x + jnp.tanh(x @ w + b[None, :])
        return jnp.mean(x**2)

    batch = jax.ShapeDtypeStruct((256 * devices, 64), jnp.float32)
    return Problem(loss_fn, params, batch, {})


def full_problem(devices: int) -> Problem:
    """Returns ResNet-18 with batch statistics, a key and metrics."""
    net, variables, batch = images("resnet18", devices, norm="batch")
    extra = {
        "model_state": {"batch_stats": variables["batch_stats"]},
        "rng": jax.eval_shape(jax.random.key, 0),
    }
    return Problem(task.make_loss(net), variables["params"], batch, extra)


def images(model: str, devices: int, norm: str = "group") -> tuple[Any, Any, Any]:
    """Returns a classifier, and the shapes of its variables and of a global batch."""
    net = models.build(model, num_classes=10, norm=norm)
    shape, size = IMAGES[model]
    batch = {
        "image": jax.ShapeDtypeStruct((size * devices, *shape), jnp.float32),
        "label": jax.ShapeDtypeStruct((size * devices,), jnp.int32),
    }
    one = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    init = functools.partial(net.init, train=True)
    return net, jax.eval_shape(init, jax.eval_shape(jax.random.key, 0), one), batch


def show(cells: list[dict[str, Any]]) -> None:
    """Prints the covered share of each program, and its asynchronous collectives."""
    programs = list(dict.fromkeys(cell["program"] for cell in cells))
    table = Table("devices", "model", *programs)
    rows: dict[tuple[str, str], dict[str, Text]] = {}
    for cell in cells:
        row = rows.setdefault((cell["target"], cell["model"]), {})
        style = "" if cell["met"] else "bold red"
        row[cell["program"]] = Text(_short(cell), style)
    for names, row in rows.items():
        table.add_row(*names, *(row.get(program, "") for program in programs))
    table.caption = "share of FLOPs under a collective, asynchronous of all collectives"
    report.console(width=125).print(table)  # also without a terminal


def _short(cell: dict[str, Any]) -> str:
    if "failed" in cell:
        return "failed"
    flags = cell["asynchronous"]
    return f"{cell['covered']:.2f}, {sum(flags)}/{len(flags)}"


def _line(cell: dict[str, Any]) -> str:
    names = f"{cell['target']}, {cell['model']}, {cell['program']}"
    if "failed" in cell:
        return f"{names}: does not compile: {cell['failed']}"
    verdict = "" if cell["met"] else f"; MISSED, the bar is {cell['bar']}"
    return f"{names}: {_short(cell)}{verdict}"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
