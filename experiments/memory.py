"""Measures how much device memory a step takes, relative to a step written by hand.

Claim: each step of delay costs one copy of the parameters, as in a step written by
hand, and nothing else is copied. The bars for an MLP of twelve layers of 2048 x 2048
with AdamW are, in copies of the parameters: 4.1 for a synchronous step, 5.2 for a
pipelined one, 5.3 with weight prediction, 6.3 at width 3, 4.6 with `two_shot(int8())`,
and 5.6 with error feedback as well. With a sharded optimizer, a pipelined step takes at
most 3.3 copies, 3.6 with weight prediction, and in each of seven models less than a
synchronous step by hand, and at least 0.95 of its FLOPs lie under its exchange. The
bars for a residual MLP with norms and biases, and for five models of
`experiments.overlap`, are 1.03 times the memory of the step by hand, where there is
such a step, and 1.5 copies of the parameters for error feedback.

Live memory is `arguments + outputs + temporaries - aliased` of the compiled program,
plus what the caller holds during the step. At width 3, the caller holds the message
that stays in flight. The limit is what any program must hold: the parameters and the
two moments of AdamW, which are three copies, and one copy for each message in flight.
With a sharded optimizer, a device holds a piece of these three copies and one copy of
the parameters that it computes with. The programs are compiled for 64 H100 GPUs, which
need not be there, and do not run.

Command: python -m experiments.memory
Time: about 17 minutes on 2 cores.
Result: experiments/results/memory.json
"""

import dataclasses
import pathlib
import sys
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
import tyro
from jax import lax
from jax.sharding import Mesh

import pipejax as pj
from pipejax.codecs import error_feedback, int8
from pipejax.collectives import two_shot
from pipejax.overlap import Memory, Report, inspect, topology

from . import by_hand, overlap, report

Model = Literal[
    "deep mlp",
    "residual mlp",
    "mlp",
    "cnn",
    "resnet18",
    "transformer",
    "transformer scan",
]
INT8 = two_shot(int8())
FEEDBACK = two_shot(error_feedback(int8()))
SHARDED = {"shard_optimizer": True}
TX = optax.adamw(1e-3)
# Steps of pipejax: the width, and further arguments of `make_train_step`.
STEPS: dict[str, tuple[int, dict[str, Any]]] = {
    "K=1": (1, {}),
    "K=2, plain": (2, {"weight_prediction": False}),
    "K=2, predicted": (2, {"weight_prediction": "own"}),
    "K=2, default": (2, {}),
    "K=3, plain": (3, {"weight_prediction": False}),
    "K=3, predicted": (3, {"weight_prediction": "own"}),
    "K=1, sharded": (1, SHARDED),
    "K=2, sharded, plain": (2, SHARDED | {"weight_prediction": False}),
    "K=2, sharded, predicted": (2, SHARDED),
    "K=2, int8": (2, {"weight_prediction": False, "all_reduce": INT8}),
    "K=2, int8 with feedback": (
        2,
        {"weight_prediction": False, "all_reduce": FEEDBACK},
    ),
}
BY_HAND = ("K=1", "K=2, plain", "K=2, predicted")
# Bars for the deep MLP: its live memory, in copies of its parameters.
BARS = {
    "K=1": 4.1,
    "K=2, plain": 5.2,
    "K=2, predicted": 5.3,
    "K=3, plain": 6.3,
    "K=3, predicted": 6.3,
    "K=2, int8": 4.6,
    "K=2, int8 with feedback": 5.6,
    "K=2, sharded, plain": 3.3,
    "K=2, sharded, predicted": 3.6,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the programs to compile."""

    target: str = "h100:1x8x8"
    """Devices to compile for, as `pj.overlap.topology` takes them."""
    models: tuple[Model, ...] = get_args(Model)
    """Models to compile: two MLPs, and five models of `experiments.overlap`."""
    steps: tuple[str, ...] = tuple(STEPS)
    """Steps of pipejax to compile, each with its step by hand where there is one."""
    out: pathlib.Path = report.RESULTS / "memory.json"
    """File to write the result to, as JSON."""


def main(config: Config) -> int:
    """Compiles every step, prints a line for each, and writes the result file.

    Returns:
      The exit code, which is 1 if a step misses its bar.
    """
    mesh = pj.data_mesh(devices=topology(config.target))
    cells = []
    for model in config.models:
        for step in config.steps:
            cells.append(measured(model, step, mesh))
            if step == "K=2, int8 with feedback" and cells[-2:-1]:
                add_feedback(cells[-1], cells[-2])
            print(_line(cells[-1]), flush=True)
    report.save(config.out, seed=0, target=config.target, cells=cells)
    return int(not all(cell["met"] for cell in cells))


def measured(model: Model, step: str, mesh: Mesh) -> dict[str, Any]:
    """Compares a step of pipejax with the step by hand, and with its bar."""
    width, _ = STEPS[step]
    problem = problem_of(model, mesh.size)
    train = step_of(step, problem, mesh)
    state = train.abstract_state(problem.params)
    unit = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(problem.params))
    found = inspect(train, state, problem.batch)
    # Messages that stay in flight are arguments only of a step that predicts.
    held = () if train.settings.weight_prediction else state.in_flight.pending[1:]
    ours = _live(found.memory) + _bytes(held) // mesh.size
    twin = report_by_hand(step, problem, mesh, train.compiler_options)
    hand = None if twin is None else _live(twin.memory)
    against = None if hand is None else ours / hand
    bar = BARS.get(step) if model == "deep mlp" else None
    met = ours / unit <= bar if bar else against is None or against <= 1.03
    if step.startswith("K=2, sharded"):
        hidden = found.covered is not None and found.covered >= 0.95
        met = (bar is None or met) and (against or 0) <= 1 and hidden
    return {
        "model": model,
        "step": step,
        "parameters": unit,
        "memory": None if found.memory is None else found.memory.to_dict(),
        "live": ours / unit,
        "limit": limit(width, mesh.size, sharded="sharded" in step),
        "by_hand": None if hand is None else hand / unit,
        "over_by_hand": against,
        "covered": found.covered,
        "bar": bar,
        "met": met,
    }


def problem_of(model: Model, devices: int) -> overlap.Problem:
    """Makes a model and the shapes that it takes."""
    if model == "deep mlp":
        return deep_mlp(devices)
    if model == "residual mlp":
        return residual_mlp(devices)
    return overlap.plain_problem(model, devices)


def step_of(step: str, problem: overlap.Problem, mesh: Mesh) -> pj.TrainStep:
    """Makes a step of pipejax, one of `STEPS`."""
    width, options = STEPS[step]
    return pj.make_train_step(
        problem.loss_fn, TX, mesh=mesh, width=width, donate=True, **options
    )


def limit(width: int, devices: int, *, sharded: bool) -> float:
    """Returns what any program must hold, in copies of the parameters."""
    learned = 1 + 3 / devices if sharded else 3
    return learned + width - 1


def add_feedback(cell: dict[str, Any], without: dict[str, Any]) -> None:
    """Adds what error feedback takes, in copies of the parameters, and its bar."""
    cell["feedback"] = cell["live"] - without["live"]
    cell["met"] = cell["met"] and cell["feedback"] <= 1.5


def deep_mlp(devices: int) -> overlap.Problem:
    """Makes an MLP of twelve layers of 2048 x 2048, with 32 examples per device."""
    side = 2048
    params = [jax.ShapeDtypeStruct((side, side), jnp.float32) for _ in range(12)]

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    batch = jax.ShapeDtypeStruct((32 * devices, side), jnp.float32)
    return overlap.Problem(loss_fn, params, batch, {})


def residual_mlp(devices: int) -> overlap.Problem:
    """Makes an MLP of eight residual blocks, with 512 examples per device."""
    width, wide = 1024, 4096

    def form(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    block = {
        "scale": form(width),
        "up": form(width, wide),
        "up_bias": form(wide),
        "down": form(wide, width),
        "down_bias": form(width),
    }

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        x = batch
        for p in params:
            norm = lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
            hidden = jax.nn.gelu((x * norm * p["scale"]) @ p["up"] + p["up_bias"])
            x = x + hidden @ p["down"] + p["down_bias"]
        return jnp.mean(x**2)

    return overlap.Problem(loss_fn, [block] * 8, form(512 * devices, width), {})


def rows(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns titles, then the memory of each model without and with sharding.

    Memory is in copies of the parameters. In brackets stands the share of the FLOPs
    under communication.
    """
    columns = {
        "D-Sync": "K=1",
        "ZeRO-1": "K=1, sharded",
        "Pipe-SGD": "K=2, default",
        "Pipe-SGD, sharded, plain": "K=2, sharded, plain",
        "Pipe-SGD, sharded": "K=2, sharded, predicted",
    }
    found = {(cell["model"], cell["step"]): cell for cell in cells}
    table = [["model", "D-Sync by hand", *columns]]
    for model in dict.fromkeys(cell["model"] for cell in cells):
        shown = [found[model, step] for step in columns.values()]
        hand = found[model, "K=1"]["by_hand"]
        live = (f"{cell['live']:.2f} ({cell['covered']:.2f})" for cell in shown)
        table.append([model, f"{hand:.2f}", *live])
    return table


def report_by_hand(
    step: str,
    problem: overlap.Problem,
    mesh: Mesh,
    options: dict[str, Any],
    *,
    checks: bool = False,
) -> Report | None:
    """Returns the report on the step by hand, or `None` if there is none.

    A pipelined step with a sharded optimizer is compared with the synchronous one. The
    step is compiled with the given compiler options. `checks` is as in `by_hand`.
    """
    step = "K=1" if step.startswith("K=2, sharded") else step
    if step not in BY_HAND:
        return None
    loss_fn, params = problem.loss_fn, problem.params
    args: tuple[Any, ...] = params, jax.eval_shape(TX.init, params)
    if step == "K=1":
        program = by_hand.synchronous(loss_fn, TX, mesh, donate=True, checks=checks)
    else:
        predicts = step.endswith("predicted")
        program = by_hand.pipelined(loss_fn, TX, mesh, predicts=predicts, checks=checks)
        args = (*args, jax.tree.map(lambda x: overlap.on_each(mesh.size, x), params))
    return inspect(program, *args, problem.batch, compiler_options=options)


def _live(memory: Memory | None) -> int:
    if memory is None:
        raise ValueError("the compiler of this target does not say what memory it uses")
    return memory.live


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _line(cell: dict[str, Any]) -> str:
    hand = "" if cell["by_hand"] is None else f", by hand {cell['by_hand']:.2f}"
    verdict = "" if cell["met"] else "; MISSED"
    return (
        f"{cell['model']}, {cell['step']}: {cell['live']:.2f} times the parameters"
        f" (limit {cell['limit']:.0f}{hand}), covered {cell['covered']:.2f}{verdict}"
    )


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
