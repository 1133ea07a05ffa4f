"""`pipejax plan`: which width, algorithm, codec and buckets, and how long a step is."""
# ruff: noqa: T201 - printing is what a command is for.

import argparse
import json
import pathlib
from typing import Any

from pipejax import codecs, timing

from ._usage import UsageError, in_one_line


def add(commands: Any) -> None:
    """Its arguments."""
    parser = commands.add_parser(
        "plan",
        help="rank widths, algorithms, codecs and buckets by the step time to expect",
        description="Predicts the step time of every way to train a model on a cluster,"
        " the best first, with the reason and the most that pipelining can gain.",
    )
    parser.set_defaults(command=run)
    parser.add_argument("cluster", help="a file that `pipejax calibrate --out` wrote")
    parser.add_argument(
        "--elements", type=int, required=True, help="parameters of the model"
    )
    parser.add_argument(
        "--compute-ms",
        type=float,
        required=True,
        help="of a step on one device: forward, backward and update",
    )
    parser.add_argument(
        "--one-core",
        action="store_true",
        help="codecs run where the model does, as on a CPU",
    )
    parser.add_argument("--top", type=int, default=10, help="how many to print")
    parser.add_argument(
        "--plot", metavar="PNG", help="draw efficiency on up to 4,096 hosts"
    )


def run(args: argparse.Namespace) -> int:
    """`pipejax plan`."""
    for name, value in (("elements", args.elements), ("compute-ms", args.compute_ms)):
        if not value > 0:
            raise UsageError(f"`--{name}` must be above 0, got {value}")
    cluster = _read(args.cluster)
    compute = timing.Compute.of(args.compute_ms / 1e3)
    with in_one_line(ValueError):
        # PowerSGD needs the shapes of the leaves, which nobody gives here.
        known = {n: codecs.named(n) for n in cluster.codecs if n != "power_sgd"}
    ranked = timing.plan(cluster, args.elements, compute, known, one_core=args.one_core)
    for choice in ranked[: args.top]:
        print(choice)
    best = ranked[0]
    most = timing.ceilings(compute, best.exchange)
    print(
        "with the exchange of the first, pipelining gains at most"
        f" {most['synchronous']:.2f} over D-Sync, {most['overlapped']:.2f} over D-Sync"
        " beside the backward pass"
    )
    if args.plot:
        curves = {
            str(way): timing.scaling(
                cluster, way, args.elements, compute, known, one_core=args.one_core
            )
            for way in (best.way, *_synchronous(ranked))
        }
        with in_one_line(ImportError, OSError, ValueError):
            timing.picture(curves, args.plot)
    return 0


def _read(path: str) -> timing.Cluster:
    with in_one_line(OSError, ValueError):
        return timing.from_json(json.loads(pathlib.Path(path).read_text()))


def _synchronous(ranked: list[timing.Choice]) -> list[timing.Way]:
    """What stands beside the best: the best that waits, and that with all bits."""
    waits = [choice.way for choice in ranked if choice.way.width == 1]
    plain = next(way for way in waits if way.codec is None)
    return list(dict.fromkeys([waits[0], plain]))
