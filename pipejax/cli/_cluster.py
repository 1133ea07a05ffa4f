"""The cluster that the command line is about: calibrated, or with assumed speeds."""

import argparse
import dataclasses
import json
import socket
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import pipejax as pj
from pipejax import codecs, timing
from pipejax._internal.integers import is_integer

from ._units import bits, check
from ._usage import UsageError, in_one_line

_NAMES = ("hosts", "bandwidth", "devices", "device", "latency_us")
_MOST = 10_000_000  # characters of a file
_WAY = (
    "Give a file that `pipejax calibrate --out` has written, or leave it out and give"
    " --hosts and --bandwidth"
)


class Known(NamedTuple):
    """A cluster, with `notes` on where its speeds come from or why to distrust them."""

    cluster: timing.Cluster
    notes: list[str]


OPTIONS = {
    "--hosts N": "number of hosts",
    "--devices N": "number of devices on each host; 1 by default",
    "--bandwidth RATE": "bandwidth of a host's link in one direction, such as 10gbit",
    f"--device {{{','.join(timing.DEVICES)}}}": "kind of device, from whose memory the"
    " speed of codecs follows; by default cpu, which is one core",
    "--latency-us US": "latency between hosts in microseconds;"
    f" {1e6 * timing.LATENCY:.0f} by default",
}
"""Options that describe a cluster that is in no file."""


def known(args: argparse.Namespace, elements: int) -> Known:
    """Reads the cluster from the file, or makes it from the options without a file."""
    there = [name for name in _NAMES if getattr(args, name) is not None]
    if args.cluster is None:
        missing = [name for name in ("hosts", "bandwidth") if name not in there]
        if missing:
            raise UsageError(
                f"{' and '.join(map(_flag, missing))} must be given where there is no"
                " file that `pipejax calibrate --out` wrote"
            )
        return _assumed(args)
    if there:
        raise UsageError(
            f"{', '.join(map(_flag, there))} must be left out beside a file, which has"
            " these values"
        )
    return read(args.cluster, elements, shared=args.sharded or args.local_steps)


def _flag(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def calibration(fit: timing.Fit) -> dict[str, Any]:
    """Returns the cluster of a fit, and whether it can be trusted, for a JSON file."""
    samples = [
        {
            "name": sample.name,
            "elements": sample.elements,
            "measured": list(sample.times),
            "predicted": seconds,
        }
        for sample, seconds in zip(fit.samples, fit.predicted, strict=True)
    ]
    return {
        "cluster": timing.as_json(fit.cluster),
        "fit": {**timing.trust(fit).to_dict(), "samples": samples},
    }


def read(path: str, elements: int, *, shared: bool = False) -> Known:
    """Reads a file that holds a `calibration`, whose part `fit` may be missing.

    If `shared`, a device exchanges its share of the elements among those of its host.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MOST + 1)
    except OSError as error:
        raise UsageError(
            f"{path:.200} cannot be read: {error.strerror}. {_WAY}"
        ) from error
    except ValueError as error:  # bytes that are no text, or a name that is none
        raise UsageError(f"{path!r:.200} must be JSON: {error}. {_WAY}") from error
    try:
        if len(text) > _MOST:
            raise ValueError(f"it has more than {_MOST:,} characters")
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} must be JSON: {error}. {_WAY}") from error
    try:
        return _of(record, elements, shared=shared)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def extrapolated(elements: int, largest: int | None) -> list[str]:
    """Returns a line if a gradient is longer than all vectors measured, else none."""
    if not largest or elements <= largest:
        return []
    return [
        f"Extrapolated: the gradient has {elements / largest:.1f} times the elements of"
        f" the largest vector measured, {largest:,}."
    ]


HOSTS = {
    "--hosts N": "number of hosts, each with as many of the devices; by default,"
    " accelerators are counted by the names of their hosts, and each CPU device is one"
}
"""The option of commands that measure links."""


class Measured(NamedTuple):
    """The mesh to measure on.

    Attributes:
      mesh: A mesh with an axis of hosts and one of the devices of each, if there are
        several of both, and otherwise with a single axis.
      notes: A line if devices that share a host are measured as hosts.
    """

    mesh: Mesh
    notes: list[str]


def measured(hosts: int | None) -> Measured:
    """Returns the mesh of all devices, equally many on each of some hosts.

    `None` counts the hosts by their names. On CPUs, where hosts are often emulated and
    have one name, it takes each device for a host. All processes must call it.
    """
    mesh = pj.data_mesh()
    names = _names_of_hosts()
    count = len(set(names)) if hosts is None else hosts
    if hosts is None and mesh.devices.flat[0].platform == "cpu":
        count = mesh.size
    if hosts is not None and (hosts < 1 or mesh.size % hosts):
        raise UsageError(
            f"`--hosts` must divide the {mesh.size} devices into equal parts, got"
            f" {hosts}. Leave it out to count the hosts"
        )
    if 1 < count < mesh.size and not mesh.size % count:
        two = pj.data_mesh(axis_name=("host", "device"), hosts=count)
        rows = [{names[x.process_index] for x in row} for row in two.devices]
        if all(len(row) == 1 for row in rows):
            return Measured(two, [])
    if len(set(names)) == mesh.size or hosts == mesh.size:
        return Measured(mesh, [])
    return Measured(
        mesh,
        [
            f"{mesh.size} devices share {len(set(names))} host(s), and each was"
            " measured as a host with a link of its own. To plan for hosts with several"
            " devices, give `pipejax plan` --hosts, --devices, --device and --bandwidth"
            " in place of a file."
        ],
    )


def _names_of_hosts() -> list[int]:
    """Returns for each process a number of the name of its host."""
    name = np.uint32(zlib.crc32(socket.gethostname().encode()))
    return np.ravel(multihost_utils.process_allgather(name)).tolist()


def kind_flags(device: Any) -> str:
    """Returns the flags of `pipejax plan` for devices of this kind, if it knows it."""
    if device.platform == "cpu":
        return " --one-core"
    kind = device.device_kind.lower()
    return next((f" --device {x}" for x in timing.DEVICES if x in kind), "")


def _of(record: Any, elements: int, *, shared: bool) -> Known:
    if not isinstance(record, Mapping) or "cluster" not in record:
        raise ValueError(
            "a calibration must be an object with `cluster`, and perhaps `fit`, as"
            " `pipejax calibrate --out` writes it; see docs/reference/files.md"
        )
    cluster = timing.from_json(record["cluster"])
    unknown = [name for name in cluster.codecs if name not in codecs.NAMES]
    if unknown:
        raise ValueError(
            f"`cluster.codecs` must have names from {', '.join(codecs.NAMES)}; got"
            f" {unknown!r:.80}. Leave out other codecs."
        )
    if "fit" not in record:
        return Known(cluster, [])
    fit = record["fit"]
    kinds = {"trusted": bool, "verdict": str, "largest": int | None}
    for name, kind in kinds.items():
        value = fit.get(name, ...) if isinstance(fit, Mapping) else ...
        count = name != "largest" or value is None or is_integer(value, 1)
        if not isinstance(value, kind) or not count:
            raise ValueError(
                "`fit` must have `trusted`, true or false, `verdict`, a text, and"
                f" `largest`, a number of elements or null; got {fit!r:.200}."
            )
    notes = [] if fit["trusted"] else [fit["verdict"]]
    vector = cluster.shard(elements) if shared else elements
    return Known(cluster, notes + extrapolated(vector, fit["largest"]))


def _assumed(args: argparse.Namespace) -> Known:
    device, latency = args.device or "cpu", timing.LATENCY
    devices = 1 if args.devices is None else args.devices
    check("hosts", args.hosts, 1, 10**9)
    check("devices", devices, 1, 10**9)
    if args.latency_us is not None:
        check("latency-us", args.latency_us, 0, 10**12)
        latency = args.latency_us / 1e6
    with in_one_line(ValueError):
        cluster = timing.assumed(
            args.hosts,
            bits("bandwidth", args.bandwidth) / 8,
            devices,
            device=device,
            latency=latency,
        )
    chosen = timing.DEVICES[device]
    named = dataclasses.asdict(cluster.shares).items()
    shares = (
        "Shares of a link's bandwidth for devices that send and receive at once:"
        f" {', '.join(f'{share:.2f} ({name})' for name, share in named)}."
    )
    inside = f", {1e-9 * chosen.inner:.0f} GB/s inside a host" if cluster.inner else ""
    return Known(
        cluster,
        [
            "This cluster is not calibrated. Assumed are"
            f" {1e6 * cluster.link.latency:.0f} us a message,"
            f" {1e6 * cluster.synchronisation:.0f} us a collective{inside}.",
            "Codecs are assumed at half of the memory's"
            f" {1e-9 * chosen.memory:.0f} GB/s: {chosen.name}.",
            *([shares] if cluster.shares != timing.Shares() else []),
        ],
    )
