"""`pipejax calibrate`: the speeds of the cluster that this runs on."""
# ruff: noqa: T201 - printing is what a command is for.

import argparse
import json
import pathlib
import statistics
from typing import Any

import jax
import optax
from jax.sharding import Mesh

import pipejax as pj
from pipejax import codecs, timing

from ._program import load, types
from ._usage import UsageError, in_one_line


def add(commands: Any) -> None:
    """Its arguments."""
    parser = commands.add_parser(
        "calibrate",
        help="measure latency, bandwidth and codecs of a cluster",
        description="Times exchanges of several sizes between all processes, fits the"
        " cluster's speeds, and prints what was measured beside what the fit predicts."
        " Run it on every host, started as the training itself is.",
    )
    parser.set_defaults(command=run)
    parser.add_argument("--out", metavar="FILE", help="write the cluster as JSON")
    parser.add_argument(
        "--codecs",
        nargs="*",
        default=["bf16", "int8"],
        metavar="NAME",
        help=f"whose speed to measure, of {', '.join(codecs.NAMES)}",
    )
    parser.add_argument("--rounds", type=int, default=7, help="of all, medians count")
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="measure what a step computes, too: a function of a mesh that returns"
        " (train, state, batch), as for `pipejax inspect`, with arrays",
    )


def run(args: argparse.Namespace) -> int:
    """`pipejax calibrate`."""
    least = 2 if args.model else 1
    if args.rounds < least:
        raise UsageError(f"`--rounds` must be at least {least}, got {args.rounds}")
    with in_one_line(ValueError, pj.launch.RollCallError):
        chosen = {name: codecs.named(name) for name in args.codecs}
        pj.launch.initialize()
    mesh = pj.data_mesh()
    # First, since it is the user's code: if it fails, nothing measured is lost.
    model = _measured(args.model, mesh, args.rounds) if args.model else None
    with in_one_line(ValueError):
        fit = timing.calibrate(mesh, chosen, rounds=args.rounds)
    if jax.process_index() == 0:
        print(fit)
        if model:
            print(model)
        if args.out:
            text = json.dumps(timing.as_json(fit.cluster), indent=2) + "\n"
            with in_one_line(OSError):
                pathlib.Path(args.out).write_text(text)
    return 0


def _measured(name: str, mesh: Mesh, rounds: int) -> str:
    """What a step computes, as the flags of `pipejax plan`."""
    train, state, batch = _given(name, load(name)(mesh))
    times = pj.overlap.measure(train, state, batch, rounds=rounds, steps=1)
    compute = 1e3 * statistics.median(times.compute)
    elements = optax.tree.size(state.params)
    return f"model: --elements {elements} --compute-ms {compute:.3f}"


def _given(name: str, returned: Any) -> tuple[pj.TrainStep, pj.PipelineState, Any]:
    """Train step, state and batch; a usage error for anything else."""
    match returned:
        case (pj.TrainStep(), pj.PipelineState() as state, batch):
            leaves = jax.tree.leaves((state, batch))
            if not any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
                return returned
    raise UsageError(
        f"{name} must return (train, state, batch) with a pj.TrainStep and arrays, got"
        f" {types(returned)}"
    )
