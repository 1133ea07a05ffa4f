"""`pipejax calibrate`: the speeds of the cluster that this runs on."""
# ruff: noqa: T201 - printing is what a command is for.

import argparse
import pathlib
import statistics
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

import pipejax as pj
from pipejax import codecs, timing

from ._candidates import candidates
from ._cluster import extrapolated, written
from ._program import load, types
from ._units import count
from ._usage import UsageError, in_one_line


def add(commands: Any) -> None:
    """Its arguments."""
    parser = commands.add_parser(
        "calibrate",
        help="measure latency, bandwidth and codecs of a cluster",
        description="Times exchanges of several sizes between all processes, fits the"
        " cluster's speeds, prints what was measured beside what the fit predicts, and"
        " says whether the fit can be trusted. Run it on every host, started as the"
        " training itself is.",
    )
    parser.set_defaults(command=run)
    parser.add_argument("--out", metavar="FILE", help="write the cluster as JSON")
    parser.add_argument(
        "--codecs",
        nargs="*",
        default=["bf16", "int8", "power_sgd"],
        metavar="NAME",
        help=f"whose speed to measure, of {', '.join(codecs.NAMES)}; with error"
        " feedback those that need it",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=[str(n) for n in timing.SIZES],
        metavar="COUNT",
        help="of the vectors that are exchanged, elements, such as 4M",
    )
    parser.add_argument("--rounds", type=int, default=7, help="of all, medians count")
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="measure what a step computes, too: a function of a mesh that returns"
        " (train, state, batch), as for `pipejax inspect`, with arrays; on several"
        " processes the batch is train.batch(part)",
    )


def run(args: argparse.Namespace) -> int:
    """`pipejax calibrate`."""
    least = 2 if args.model else 1
    if args.rounds < least:
        raise UsageError(f"`--rounds` must be at least {least}, got {args.rounds}")
    sizes = [count("sizes", text) for text in args.sizes]
    with in_one_line(ValueError, pj.launch.RollCallError):
        pj.launch.initialize()
        chosen = candidates(args.codecs)  # some hold a key, an array on a device
    mesh = pj.data_mesh()
    # First, since it is the user's code: if it fails, nothing measured is lost.
    model = _measured(args.model, mesh, args.rounds) if args.model else None
    with in_one_line(ValueError):
        fit = timing.calibrate(mesh, chosen, sizes, rounds=args.rounds)
    if jax.process_index() == 0:
        trust = timing.trust(fit)
        print(f"{fit}\n\n{trust}")
        if model:
            print("\n".join([*extrapolated(model.elements, trust.largest), str(model)]))
        if args.out:
            with in_one_line(OSError):
                pathlib.Path(args.out).write_text(written(fit))
    return 0


class Model(NamedTuple):
    """What a model's step asks.

    Attributes:
      elements: of its gradient.
      compute: milliseconds that it takes without an exchange.
      batch: examples that a device takes in it.
    """

    elements: int
    compute: float
    batch: int

    def __str__(self) -> str:
        """The flags of `pipejax plan`."""
        return (
            f"model: --parameters {self.elements} --compute-ms {self.compute:.3f}"
            f" --batch {self.batch}"
        )


def _measured(name: str, mesh: Mesh, rounds: int) -> Model:
    train, state, batch = _given(name, load(name)(mesh))
    times = pj.overlap.measure(train, state, batch, rounds=rounds, steps=1)
    return Model(
        optax.tree.size(state.params),
        1e3 * statistics.median(times.compute),
        len(jax.tree.leaves(batch)[0]) // mesh.size,
    )


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
