"""Counts the work of an update by a sharded optimizer: FLOPs and bytes of programs.

Claim: on one device a step with a sharded optimizer does exactly the work of the step
without. On p devices, its update takes a p-th of the FLOPs, and of the bytes a p-th and
a rest, which does not grow with p: gradients are laid out as one vector and parameters
taken out of one.

The FLOPs and bytes are XLA's own estimates for compiled programs, without those of a
program that computes loss and gradients alone. The limit is a p-th of what the update
of the step without a sharded optimizer takes on one device. The programs are compiled
for GPUs that need not be there, and do not run.

Command: python -m experiments.sharded_optimizer.work
Time: about 10 minutes on 2 cores.
Result: experiments/results/sharded_optimizer_work.json
"""

import dataclasses
import pathlib
from typing import Any, NamedTuple

import jax
import tyro
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import pipejax as pj
from experiments import memory, overlap, report
from pipejax._internal.mesh import on_mesh
from pipejax.overlap import topology


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the programs to compile."""

    targets: tuple[str, ...] = ("h100:1x1x1", "h100:1x1x8", "h100:1x8x8")
    """Devices to compile for, as `pj.overlap.topology` takes them."""
    models: tuple[memory.Model, ...] = ("deep mlp", "residual mlp")
    """Models to compile, of those of `experiments.memory`."""
    out: pathlib.Path = report.RESULTS / "sharded_optimizer_work.json"
    """File to write the result to, as JSON."""


# For each step with a sharded optimizer, the step without.
TWINS = {"K=1, sharded": "K=1", "K=2, sharded, plain": "K=2, plain"}


class Work(NamedTuple):
    """XLA's estimates of what one device does in a program."""

    flops: float
    bytes: float

    @classmethod
    def of(cls, lowered: jax.stages.Lowered, options: dict[str, Any]) -> "Work":
        """Compiles a program, and returns what XLA estimates."""
        found = lowered.compile(compiler_options=options or None).cost_analysis()
        if found is None:
            raise ValueError("the compiler of this target estimates no costs")
        return cls(found["flops"], found["bytes accessed"])


def main(config: Config) -> list[dict[str, Any]]:
    """Compiles every step, prints the table, and writes the result file."""
    cells = []
    for model in config.models:
        for target in config.targets:
            mesh = pj.data_mesh(devices=topology(target))
            cells += [measured(model, step, mesh) for step in TWINS]
            print(cells[-len(TWINS) :], flush=True)
    report.save(config.out, seed=0, cells=cells)
    report.console(width=120).print(report.table("work of the update", rows(cells)))
    return cells


def measured(model: memory.Model, step: str, mesh: Mesh) -> dict[str, Any]:
    """Returns the work of a step, of its twin, and of loss and gradients alone."""
    problem = memory.problem_of(model, mesh.size)
    programs = {}
    for name, each in (("sharded", step), ("unsharded", TWINS[step])):
        train = memory.step_of(each, problem, mesh)
        lowered = train.lower(train.abstract_state(problem.params), problem.batch)
        options = train.compiler_options
        programs[name] = Work.of(lowered, options)._asdict()
    programs["gradients"] = Work.of(gradients(problem, mesh), options)._asdict()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(problem.params))
    return {
        "model": model,
        "step": step,
        "devices": mesh.size,
        "size": size,
        **programs,
    }


def gradients(problem: overlap.Problem, mesh: Mesh) -> jax.stages.Lowered:
    """Lowers a program that computes the loss and the gradients of each device."""

    def local(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(problem.loss_fn)(params, batch)
        return loss[None], grads

    program = jax.jit(on_mesh(local, mesh, (P(), P("data")), P("data")))
    return program.lower(problem.params, problem.batch)


def rows(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns titles, then the work of each update.

    FLOPs are for each parameter, and bytes in copies of the parameters.
    """
    table = [
        [
            *("model", "step", "GPUs"),
            *("FLOPs an element", "not sharded", "limit"),
            *("bytes, copies", "not sharded", "limit"),
        ]
    ]
    alone = {
        (cell["model"], cell["step"]): cell for cell in cells if cell["devices"] == 1
    }
    for cell in cells:
        one, row = alone[cell["model"], cell["step"]], []
        for kind, unit in (("flops", cell["size"] / 4), ("bytes", cell["size"])):
            update = {
                name: (each[name][kind] - each["gradients"][kind]) / unit
                for name, each in (("sharded", cell), ("unsharded", one))
            }
            twin = (cell["unsharded"][kind] - cell["gradients"][kind]) / unit
            limit = update["unsharded"] / cell["devices"]
            row += [f"{update['sharded']:.2f}", f"{twin:.2f}", f"{limit:.2f}"]
        table.append([cell["model"], cell["step"], str(cell["devices"]), *row])
    return table


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
