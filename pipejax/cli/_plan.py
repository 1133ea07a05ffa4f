"""`pipejax plan`: ranks the ways to train on a cluster by their step time."""
# ruff: noqa: T201 - printing is what a command is for.

import argparse
from collections.abc import Mapping
from typing import Any

import jax

from pipejax import timing
from pipejax.codecs import Codec
from pipejax.overlap import amount

from . import _cluster
from ._candidates import candidates, feeds_back
from ._command import add_command, write_json
from ._plan_summary import summary
from ._rows import (
    chosen,
    d_sync,
    exact,
    in_rounds,
    lines,
    synchronous,
)
from ._snippet import about_predictions, snippet
from ._units import COMPUTE_MS, MOST, check, count
from ._usage import UsageError, in_one_line

EXAMPLE = "pipejax plan cluster.json --parameters 300M --compute-ms 250"

_DESCRIPTION = """\
Predict the step time of a model on a cluster for widths 1 and 2, every algorithm,
the codecs whose speed is known there, and several numbers of buckets. Print the
fastest setups, how many times as fast as D-Sync they are, what their time comes from,
how much pipelining can gain at most, and from which batch size on the exchange is
hidden. Print the train step of the fastest setup, or of --row, as Python.

The cluster is a file that `pipejax calibrate --out` has written. Without a file,
--hosts and --bandwidth describe it, and its other speeds are assumed."""

_OPTIONS = {
    "!--parameters COUNT": "number of the model's parameters, such as 300M",
    "!--compute-ms MS": "milliseconds that one device computes in a step: forward pass,"
    " backward pass and update",
    "--update-ms MS": "milliseconds of these that the update takes; predictions above"
    " width 1 take as long again; 0 by default",
    "--batch N": "number of examples that a device takes in this step, or a host with"
    " --sharded or --local-steps; batch sizes are then printed in examples too",
    "--one-core": "codecs run on the core that runs the model, as on a CPU",
    "--sharded": "the devices of a host shard the model (FSDP); --compute-ms is then a"
    " step of one host alone, with the collectives inside it",
    "--shard-optimizer": "every device keeps its share of the optimizer (ZeRO-1): list"
    " the setups that can, with the reduce-scatter beside the forward pass and the"
    " all-gather beside the backward pass, or with --one-core both beside both",
    "--local-steps": "every host trains alone, and hosts exchange parameters in rounds:"
    " list how long rounds must be; --compute-ms is then a step of one host alone",
    "--baseline {float32,bf16}": "what D-Sync sends in the run that gains are relative"
    " to; float32 by default; bf16 if your gradients already travel in bfloat16",
    "--top N": "number of rows to print; 10 by default; the row of D-Sync and the best"
    " pipelined row that is uncompressed are always printed",
    "--row N": "number of the row whose train step is printed; by default the first row"
    " in one bucket",
    "--out FILE": "write all setups to this file as JSON",
    "--plot PNG": "draw the efficiency on up to 4,096 hosts into this file",
}


_BYTES = {"float32": 4, "bf16": 2}


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "plan",
        summary="Rank the setups to train on a cluster by their predicted step time.",
        description=_DESCRIPTION,
        example=EXAMPLE,
        run=run,
        options=_cluster.OPTIONS | _OPTIONS,
        top=10,
        update_ms=0.0,
        baseline="float32",
    )
    parser.add_argument(
        "cluster",
        nargs="?",
        help="a file that `pipejax calibrate --out` has written; without it, give"
        " --hosts and --bandwidth",
    )


def run(args: argparse.Namespace) -> int:
    elements = count("parameters", args.parameters)
    check("compute-ms", args.compute_ms, *COMPUTE_MS)
    check("update-ms", args.update_ms, 0, args.compute_ms)
    check("top", args.top, 1, 10**6)
    if args.shard_optimizer and args.local_steps:
        raise UsageError(
            "`--shard-optimizer` must be left out with `--local-steps`, in which every"
            " host has an optimizer of its own"
        )
    if args.batch is not None:
        check("batch", args.batch, 1, MOST)
    cluster, notes = _cluster.known(args, elements)
    if args.sharded:
        notes = [*notes, _inside(cluster, elements)]
    devices = cluster.devices
    if args.sharded or args.local_steps:
        # A device exchanges only its shard of the gradient, rounded up to whole
        # elements.
        cluster, elements = timing.sharded(cluster), cluster.shard(elements)
    update = args.update_ms / 1e3
    compute = timing.Compute.of(args.compute_ms / 1e3 - update, update)
    # Nothing is run, so leave the accelerators of this machine alone.
    jax.config.update("jax_platforms", "cpu")
    known = candidates(cluster.codecs)
    with in_one_line(ValueError):
        ranked = timing.plan(
            cluster,
            elements,
            compute,
            known,
            one_core=args.one_core,
            baseline_bytes=_BYTES[args.baseline],
        )
    if args.shard_optimizer:
        ranked = timing.shard_optimizer(
            ranked, compute, cluster.hosts * cluster.devices, one_core=args.one_core
        )
    if args.local_steps:
        rounds = in_rounds(ranked, known, compute, one_core=args.one_core)
        ranked = [*rounds, d_sync(ranked), exact(ranked)]
    choice = chosen(ranked, args.row)

    def own(way: timing.RankedConfig) -> timing.Compute:
        return way.config.own(compute, cluster, elements, one_core=args.one_core)

    python = snippet(choice.config, cluster, inner=_inner_axis(args, devices))
    # A sharded optimizer cannot exchange a part at once.
    unsharded = not args.shard_optimizer
    predictions = (
        about_predictions(choice.config, cluster, one_core=args.one_core)
        if unsharded
        else []
    )
    parts = [
        [*notes, *_about(known)],
        lines(ranked, args.top, (choice, exact(ranked), d_sync(ranked))),
        [*summary(ranked, choice, own, args), *predictions],
        [python],
    ]
    print("\n\n".join("\n".join(part) for part in parts if part))
    with in_one_line(ImportError, OSError, ValueError):
        if args.out:
            record = {
                "cluster": timing.as_json(cluster),
                "elements": elements,
                "compute": compute.total,
                "ways": [choice.to_dict() for choice in ranked],
                "python": python,
            }
            write_json(args.out, record)
        if args.plot:
            curves = {
                str(config): timing.scaling(
                    cluster, config, elements, compute, known, one_core=args.one_core
                )
                for config in (ranked[0].config, *_synchronous(ranked))
            }
            timing.picture(curves, args.plot)
    return 0


def _inner_axis(args: argparse.Namespace, devices: int) -> str | None:
    """Returns the mesh axis of the devices of a host, if they are a group."""
    if args.sharded:
        return "fsdp"
    return "device" if args.local_steps and devices > 1 else None


def _inside(cluster: timing.Cluster, elements: int) -> str:
    """Says what a sharded model moves inside a host, and what it sends to others."""
    if cluster.devices < 2:
        raise UsageError(
            "`--sharded` must be used with several devices on each host, got"
            f" {cluster.devices}; give --devices, or a file of hosts with several"
        )
    found = timing.fsdp(cluster, elements)
    return (
        f"The {cluster.devices} devices of a host shard the model. In float32, each"
        f" sends {amount(found.bytes)}B inside its host in a step, which takes at least"
        f" {1e3 * found.seconds:.1f} ms of the compute. Between hosts, each exchanges"
        f" its {amount(4 * elements / cluster.devices)}B of the gradients, and they"
        " share the host's link."
    )


def _about(known: Mapping[str, Codec]) -> list[str]:
    fed = ", ".join(name for name in known if feeds_back(name))
    notes = [f"Codecs with error feedback: {fed}."] if fed else []
    if any(codec.needs_leaves for codec in known.values()):
        notes.append("power_sgd is of rank 4, for a model of 1,024 x 1,024 matrices.")
    return notes


def _synchronous(ranked: list[timing.RankedConfig]) -> list[timing.TrainConfig]:
    waits = [choice.config for choice in synchronous(ranked)]
    plain = next(config for config in waits if config.codec is None)
    return list(dict.fromkeys([waits[0], plain]))
