"""`pipejax calibrate`: the speeds of the cluster that this runs on."""
# ruff: noqa: T201 - printing is what a command is for.

import argparse
import json
import pathlib
from typing import Any

import jax

import pipejax as pj
from pipejax import codecs, timing

from ._join import join
from ._usage import UsageError, in_one_line


def add(commands: Any) -> None:
    """Its arguments."""
    parser = commands.add_parser(
        "calibrate",
        help="measure latency, bandwidth and codecs of a cluster",
        description="Times exchanges of several sizes between all processes, fits the"
        " cluster's speeds, and prints what was measured beside what the fit predicts."
        " Run it on every host, as the training itself is run: where RANK, WORLD_SIZE,"
        " MASTER_ADDR and MASTER_PORT are set, as by torchrun, it joins them.",
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


def run(args: argparse.Namespace) -> int:
    """`pipejax calibrate`."""
    if args.rounds < 1:
        raise UsageError(f"`--rounds` must be at least 1, got {args.rounds}")
    with in_one_line(ValueError):
        chosen = {name: codecs.named(name) for name in args.codecs}
    join()
    with in_one_line(ValueError):
        fit = timing.calibrate(pj.data_mesh(), chosen, rounds=args.rounds)
    if jax.process_index() == 0:
        print(fit)
        if args.out:
            text = json.dumps(timing.as_json(fit.cluster), indent=2) + "\n"
            with in_one_line(OSError):
                pathlib.Path(args.out).write_text(text)
    return 0
