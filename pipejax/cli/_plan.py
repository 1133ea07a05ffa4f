"""`pipejax plan`: which width, algorithm, codec and buckets, and how long a step is."""
# ruff: noqa: T201 - printing is what a command is for.

import argparse
import json
import math
import pathlib
from typing import Any

import jax

from pipejax import timing

from . import _cluster
from ._candidates import candidates
from ._snippet import snippet
from ._units import count
from ._usage import UsageError, in_one_line


def add(commands: Any) -> None:
    """Its arguments."""
    parser = commands.add_parser(
        "plan",
        help="rank widths, algorithms, codecs and buckets by the step time to expect",
        description="Predicts the step time of every way to train a model on a cluster,"
        " the best first, with the reason and the most that pipelining can gain. Says"
        " from which batch size on the exchange is hidden, and prints the train step as"
        " Python. The cluster is a calibrated file, or --hosts and --bandwidth with"
        " assumed speeds.",
    )
    parser.set_defaults(command=run)
    _cluster.add(parser)
    parser.add_argument(
        "--parameters",
        required=True,
        metavar="COUNT",
        help="of the model, such as 300M",
    )
    parser.add_argument(
        "--compute-ms",
        type=float,
        required=True,
        metavar="MS",
        help="of a step on one device: forward, backward and update",
    )
    parser.add_argument(
        "--batch",
        type=int,
        metavar="COUNT",
        help="examples that a device takes in such a step",
    )
    parser.add_argument(
        "--one-core",
        action="store_true",
        help="codecs run where the model does, as on a CPU",
    )
    parser.add_argument(
        "--top", type=int, default=10, metavar="COUNT", help="how many to print"
    )
    parser.add_argument("--out", metavar="FILE", help="write all of them as JSON")
    parser.add_argument(
        "--plot", metavar="PNG", help="draw efficiency on up to 4,096 hosts"
    )


def run(args: argparse.Namespace) -> int:
    """`pipejax plan`."""
    elements = count("parameters", args.parameters)
    for name in ("compute_ms", "batch", "top"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            option = name.replace("_", "-")
            raise UsageError(f"`--{option}` must be above 0, got {value}")
    cluster, notes = _cluster.known(args, elements)
    compute = timing.Compute.of(args.compute_ms / 1e3)
    # Nothing runs: leave alone what accelerators there are.
    jax.config.update("jax_platforms", "cpu")
    with in_one_line(ValueError):
        chosen = candidates(cluster.codecs)
    if any(codec.needs_leaves for codec in chosen.values()):
        notes.append("power_sgd is of rank 4, for a model of 1,024 x 1,024 matrices.")
    ranked = timing.plan(cluster, elements, compute, chosen, one_core=args.one_core)
    # With several buckets it would be a step of one's own.
    way = next(choice.way for choice in ranked if choice.way.buckets == 1)
    parts = [
        notes,
        [str(choice) for choice in ranked[: args.top]],
        _summary(ranked, compute, args),
        [snippet(way)],
    ]
    print("\n\n".join("\n".join(lines) for lines in parts if lines))
    with in_one_line(ImportError, OSError, ValueError):
        if args.out:
            text = _written(cluster, elements, compute, ranked, way)
            pathlib.Path(args.out).write_text(text)
        if args.plot:
            curves = {
                str(way): timing.scaling(
                    cluster, way, elements, compute, chosen, one_core=args.one_core
                )
                for way in (ranked[0].way, *_synchronous(ranked))
            }
            timing.picture(curves, args.plot)
    return 0


def _summary(
    ranked: list[timing.Choice], compute: timing.Compute, args: argparse.Namespace
) -> list[str]:
    """What pipelining can gain, and from which batch size it hides the exchange."""
    most = timing.ceilings(compute, ranked[0].exchange)
    piped = [choice for choice in ranked if choice.way.width > 1]
    plain = next(choice for choice in piped if choice.way.codec is None)
    return [
        "With the exchange of the first, pipelining gains at most"
        f" {most['synchronous']:.2f} over D-Sync, {most['overlapped']:.2f} over D-Sync"
        " beside the backward pass.",
        *(_hidden(each, compute, args) for each in dict.fromkeys([piped[0], plain])),
    ]


def _hidden(
    choice: timing.Choice, compute: timing.Compute, args: argparse.Namespace
) -> str:
    times = timing.batch_to_hide(
        compute, choice.exchange, choice.way.width, one_core=args.one_core
    )
    sizes = f"from {times:.2f} times this batch size on"
    if not times:
        sizes = "with any batch size"
    elif args.batch is not None:
        sizes += f", {math.ceil(args.batch * times):,} examples a device"
    return f"The exchange of {choice.way} is hidden {sizes}."


def _written(
    cluster: timing.Cluster,
    elements: int,
    compute: timing.Compute,
    ranked: list[timing.Choice],
    way: timing.Way,
) -> str:
    """All of it as JSON; times in seconds."""
    ways = [
        {
            **choice.way._asdict(),
            "step": choice.step,
            "exchange": choice.exchange._asdict(),
            "reason": choice.reason,
        }
        for choice in ranked
    ]
    record = {
        "cluster": timing.as_json(cluster),
        "elements": elements,
        "compute": compute.total,
        "ways": ways,
        "python": snippet(way),
    }
    return json.dumps(record, indent=2, allow_nan=False) + "\n"


def _synchronous(ranked: list[timing.Choice]) -> list[timing.Way]:
    """What stands beside the best: the best that waits, and that with all bits."""
    waits = [choice.way for choice in ranked if choice.way.width == 1]
    plain = next(way for way in waits if way.codec is None)
    return list(dict.fromkeys([waits[0], plain]))
