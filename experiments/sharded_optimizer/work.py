"""Counts the work of steps with a sharded optimizer on 1, 8 and 64 GPUs.

Claim: on one GPU, the step does the work of one without a sharded optimizer. On p GPUs,
a device has 1/p of the FLOPs of the update. Its bytes have a rest that does not fall,
since it still reads all gradients and writes all gathered parameters.

Work is what a device does beside loss and gradients, which are compiled alone and
subtracted: FLOPs, and bytes that instructions read and write, by XLA's own estimate of
the compiled program. A device has as many examples for every p. What XLA leaves to
libraries of NVIDIA, matrix products among them, has no FLOPs there, in either program.

The programs are those of `experiments.memory`, with everything donated, for GPUs that
need not be there. They do not run.

Command: python -m experiments.sharded_optimizer.work
Time: about 10 minutes on 2 cores.
Result: experiments/results/sharded_optimizer_work.json
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jaxlib._hlo
import jaxlib._jax
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax.overlap import topology

from .. import memory, report

STEPS = {
    "K=1": "K=1, sharded",
    "K=2, plain": "K=2, sharded, plain",
    "K=2, predicted": "K=2, sharded, predicted",
}
"""Steps without a sharded optimizer, and those with one."""
TARGETS = {1: "h100:1x1x1", 8: "h100:1x1x8", 64: "h100:1x8x8"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the programs to compile."""

    models: tuple[memory.Model, ...] = ("residual mlp", "transformer")
    """Models to compile, of those of `experiments.memory`."""
    out: pathlib.Path = report.RESULTS / "sharded_optimizer_work.json"
    """File to write the result to, as JSON."""


def main(config: Config) -> None:
    """Compiles all steps, prints the table, and writes the result file."""
    jax.config.update("jax_platforms", "cpu")
    cells: list[dict[str, Any]] = []
    for model in config.models:
        alone = of_gradients(model)
        for devices, target in TARGETS.items():
            mesh = pj.data_mesh(devices=topology(target))
            for step, sharded in STEPS.items():
                whole, pieces = (
                    of_step(model, name, mesh, alone) for name in (step, sharded)
                )
                cell = {"model": model, "step": step, "devices": devices}
                cells.append({**cell, "whole": whole, "sharded": pieces})
                print(cells[-1], flush=True)
        report.save(config.out, seed=0, cells=cells)
    report.console(width=140).print(report.table("work", rows(cells)))


def of_gradients(model: memory.Model) -> dict[str, float]:
    """Returns the work of loss and gradients on one device, per parameter."""
    problem = memory.problem_of(model, 1)
    mesh = pj.data_mesh(devices=topology(TARGETS[1]))
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, P())
        ),
        (problem.params, problem.batch),
    )
    program = jax.jit(jax.value_and_grad(problem.loss_fn)).lower(*args).compile()
    return work(program, problem.params)


def of_step(
    model: memory.Model, step: str, mesh: Mesh, alone: dict[str, float]
) -> dict[str, float]:
    """Returns the work of a step on a device, per parameter, less `alone`."""
    problem = memory.problem_of(model, mesh.size)
    train = memory.step_of(step, problem, mesh)
    state = train.abstract_state(problem.params)
    lowered = train.lower(state, problem.batch)
    found = work(lowered.compile(train.compiler_options), problem.params)
    return {name: found[name] - alone[name] for name in alone}


def work(program: jax.stages.Compiled, params: Any) -> dict[str, float]:
    """Returns FLOPs, and bytes in units of float32, per parameter."""
    module = jaxlib._hlo.hlo_module_from_text(program.as_text())
    client = jax.devices("cpu")[0].client
    found = jaxlib._jax.hlo_module_cost_analysis(client, module)
    elements = sum(x.size for x in jax.tree.leaves(params))
    flops, moved = found["flops"], found["bytes accessed"]
    return {"flops": flops / elements, "copies": moved / elements / 4}


def rows(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns titles, then the work of each step, and in brackets of the whole one."""
    titles = [
        f"{name}, {devices} GPU{'s' * (devices > 1)}"
        for name in ("FLOPs", "copies")
        for devices in TARGETS
    ]
    table = [["model", "step", *titles]]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in cells:
        found.setdefault((cell["model"], cell["step"]), []).append(cell)
    for key, of_step in found.items():
        shown = [
            f"{cell['sharded'][name]:.1f} ({cell['whole'][name]:.1f})"
            for name in ("flops", "copies")
            for cell in of_step
        ]
        table.append([*key, *shown])
    return table


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
