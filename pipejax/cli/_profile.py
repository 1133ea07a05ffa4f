"""`pipejax profile-allreduce`: shows where the time of an all-reduce goes."""
# ruff: noqa: T201 - printing is what a command is for.

import argparse
from typing import Any

import jax
from jax.sharding import Mesh

import pipejax as pj
from pipejax import codecs, collectives, timing

from ._candidates import candidates
from ._cluster import measured
from ._command import add_command, write_json
from ._units import ROUNDS, VECTOR, bits, check, count
from ._usage import UsageError, enough_memory, in_one_line

NONE = "none"
"""The name that stands for an all-reduce without a codec."""

EXAMPLE = "srun pipejax profile-allreduce --codecs none int8"

_DESCRIPTION = """\
Run the parts of each all-reduce one by one, with a barrier before each
collective. Print how many milliseconds each part takes: encoding, waiting for
other devices, the first and the second exchange, adding, decoding, and
launching programs and messages.

Run this command on every host, started as the training itself is."""

_ALGORITHM = f"{{{','.join(timing.COST_MODELS)}}}"
_OPTIONS = {
    f"--algorithms {_ALGORITHM} [{_ALGORITHM} ...]": "algorithms to profile; all by"
    " default",
    "--codecs NAME [NAME ...]": "codecs under which each algorithm is profiled, out of"
    f" {NONE}, {', '.join(codecs.NAMES)}; int4 and those that need error feedback have"
    f" it; {NONE} and int8 by default",
    "--elements COUNT": "length of the vector in elements of float32, such as 4M;"
    f" {2**22:,} by default",
    "--rounds N": "how often everything is measured; medians are printed; 5 by default",
    "--bandwidth RATE": "bandwidth of a host's link, such as 10gbit; adds a column with"
    " the time that the bytes take on the wire",
    "--out FILE": "write the seconds to this file as JSON",
    "--plot PNG": "draw stacked bars of the parts into this file",
}


def add(commands: Any) -> None:
    add_command(
        commands,
        "profile-allreduce",
        summary="Show how an all-reduce divides its time among its parts.",
        description=_DESCRIPTION,
        example=EXAMPLE,
        run=run,
        options=_OPTIONS,
        algorithms=list(timing.COST_MODELS),
        codecs=[NONE, "int8"],
        elements=str(2**22),
        rounds=5,
    )


def run(args: argparse.Namespace) -> int:
    elements = count("elements", args.elements, VECTOR)
    rate = None if args.bandwidth is None else bits("bandwidth", args.bandwidth)
    check("rounds", args.rounds, 1, ROUNDS)
    with in_one_line(ValueError, pj.launch.RollCallError):
        pj.launch.initialize()
        # JAX joins before codecs are made: some hold a key, an array on a device.
        chosen = _chosen(args.algorithms, args.codecs, elements)
    if not chosen:
        raise UsageError(
            "`--algorithms` must have one that takes one of `--codecs`, got"
            f" {', '.join(args.algorithms)} and {', '.join(args.codecs)}. `psum` takes"
            " power_sgd, and `two_shot` takes every other codec"
        )
    mesh = pj.data_mesh()
    cluster = _cluster_of(mesh, rate) if rate else None
    cases = {
        name: timing.Case(getattr(collectives, algorithm)(codec), elements)
        for name, (algorithm, codec) in chosen.items()
    }
    with in_one_line(ValueError), enough_memory("elements"):
        profiles = timing.profile(mesh, cases, args.rounds)
    if jax.process_index() == 0:
        limits = {
            name: timing.flat(cluster, algorithm, elements, codec).between.wire
            / cluster.link.bandwidth
            for name, (algorithm, codec) in chosen.items()
            if cluster
        }
        _print(profiles, limits)
        with in_one_line(ImportError, OSError, ValueError):
            if args.out:
                rows = {name: each._asdict() for name, each in profiles.items()}
                write_json(args.out, rows)
            if args.plot:
                panel = timing.Panel(f"{mesh.size} devices", profiles, limits)
                timing.profile_picture([panel], args.plot)
    return 0


def _cluster_of(mesh: Mesh, rate: float) -> timing.Cluster:
    """Returns the hosts, whose links have a bandwidth in bits per second."""
    found = measured(None)
    # On CPUs, hosts are often emulated, and have one name.
    if found.notes and mesh.devices.flat[0].platform != "cpu":
        raise UsageError(
            "`--bandwidth` must be left out where devices share hosts that are not"
            f" known, got {mesh.size} devices on one host, or not equally many on each"
        )
    hosts = found.mesh.shape.get("host", mesh.size)
    devices = mesh.size // hosts
    # What stays inside a host is not on this wire.
    inner = timing.Link(0.0, rate) if devices > 1 else None
    return timing.Cluster(hosts, timing.Link(0.0, rate / 8), devices, inner)


def _chosen(
    algorithms: list[Any], names: list[str], elements: int
) -> dict[str, tuple[Any, Any]]:
    leaves = timing.square_leaves(elements)
    coded = candidates(name for name in names if name != NONE)
    found = {
        name: coded[name].of(leaves) if name in coded else None
        for name in dict.fromkeys(names)
    }
    return {
        f"{algorithm}, {name}": (algorithm, codec)
        for algorithm in algorithms
        for name, codec in found.items()
        if timing.compatible(algorithm, codec)
    }


def _print(profiles: dict[str, timing.Profile], limits: dict[str, float]) -> None:
    width = max(len(name) for name in profiles) + 2
    columns = [*timing.Profile._fields, "total", *(["wire"] if limits else [])]
    print(f"{'ms':<{width}}" + "".join(f"{name:>11}" for name in columns))
    for name, each in profiles.items():
        seconds = [*each, each.total, *([limits[name]] if limits else [])]
        print(f"{name:<{width}}" + "".join(f"{1e3 * x:11.2f}" for x in seconds))
