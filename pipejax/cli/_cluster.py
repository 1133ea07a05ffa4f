"""The cluster that the command line is about: calibrated, or with assumed speeds."""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipejax import timing
from pipejax._internal.integers import is_integer

from ._units import bits, check
from ._usage import UsageError, in_one_line

_NEEDED = ("hosts", "bandwidth")
_OPTIONAL = ("devices", "device", "latency_us")
_MOST = 10_000_000  # characters of a file
_WAY = (
    "Give a file that `pipejax calibrate --out` has written, or leave it out and give"
    " --hosts and --bandwidth"
)


class Known(NamedTuple):
    """A cluster, with `notes` on where its speeds come from or why to distrust them."""

    cluster: timing.Cluster
    notes: list[str]


def add(parser: Any) -> None:
    parser.add_argument(
        "cluster",
        nargs="?",
        help="a file that `pipejax calibrate --out` has written; without it, give"
        " --hosts and --bandwidth",
    )
    parser.add_argument("--hosts", type=int, metavar="N", help="number of hosts")
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="number of devices on each host; 1 by default",
    )
    parser.add_argument(
        "--bandwidth",
        metavar="RATE",
        help="bandwidth of a host's link in one direction, such as 10gbit",
    )
    parser.add_argument(
        "--device",
        choices=list(timing.DEVICES),
        help="kind of device, from whose memory the speed of codecs follows; by default"
        " cpu, which is one core",
    )
    parser.add_argument(
        "--latency-us",
        type=float,
        metavar="US",
        help="latency between hosts in microseconds;"
        f" {1e6 * timing.LATENCY:.0f} by default",
    )


def known(args: argparse.Namespace, elements: int) -> Known:
    """Reads the cluster from the file, or makes it from the options without a file."""
    if args.cluster is None:
        return _assumed(args)
    given = _options(args, (*_NEEDED, *_OPTIONAL), there=True)
    if given:
        raise UsageError(
            f"{', '.join(given)} must be left out beside a file, which has these values"
        )
    return read(args.cluster, elements)


def written(fit: timing.Fit) -> str:
    """Returns a calibration as JSON: the cluster, and whether it can be trusted."""
    samples = zip(fit.samples, fit.predicted, strict=True)
    record = {
        "cluster": timing.as_json(fit.cluster),
        "fit": {
            **timing.trust(fit).to_dict(),
            "samples": [
                {
                    "name": sample.name,
                    "elements": sample.elements,
                    "measured": list(sample.times),
                    "predicted": seconds,
                }
                for sample, seconds in samples
            ],
        },
    }
    return json.dumps(record, indent=2, allow_nan=False) + "\n"


def read(path: str, elements: int) -> Known:
    """Reads a calibration that `written` has written; its part `fit` may be missing."""
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
        return _of(record, elements)
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


def _of(record: Any, elements: int) -> Known:
    if not isinstance(record, Mapping) or "cluster" not in record:
        raise ValueError(
            "a calibration must be an object with `cluster`, and perhaps `fit`, as"
            " `pipejax calibrate --out` writes it; see docs/timing.md"
        )
    cluster = timing.from_json(record["cluster"])
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
    return Known(cluster, notes + extrapolated(elements, fit["largest"]))


def _assumed(args: argparse.Namespace) -> Known:
    missing = _options(args, _NEEDED, there=False)
    if missing:
        raise UsageError(
            f"{' and '.join(missing)} must be given where there is no file that"
            " `pipejax calibrate --out` wrote"
        )
    device = args.device or "cpu"
    if args.latency_us is not None:
        check("latency-us", args.latency_us, 0, 10**12)
    with in_one_line(ValueError):
        cluster = timing.assumed(
            args.hosts,
            bits("bandwidth", args.bandwidth) / 8,
            1 if args.devices is None else args.devices,
            device=device,
            latency=timing.LATENCY
            if args.latency_us is None
            else args.latency_us / 1e6,
        )
    chosen = timing.DEVICES[device]
    inside = f", {1e-9 * chosen.inner:.0f} GB/s inside a host" if cluster.inner else ""
    return Known(
        cluster,
        [
            "This cluster is not calibrated. Assumed are"
            f" {1e6 * cluster.link.latency:.0f} us a message,"
            f" {1e6 * cluster.synchronisation:.0f} us a collective{inside}.",
            "Codecs are assumed at half of the memory's"
            f" {1e-9 * chosen.memory:.0f} GB/s: {chosen.name}.",
            *_shares(cluster.shares),
        ],
    )


def _shares(shares: timing.Shares) -> list[str]:
    if shares == timing.Shares():
        return []
    named = dataclasses.asdict(shares).items()
    return [
        "Shares of a link's bandwidth for devices that send and receive at once:"
        f" {', '.join(f'{share:.2f} ({name})' for name, share in named)}."
    ]


def _options(
    args: argparse.Namespace, names: tuple[str, ...], *, there: bool
) -> list[str]:
    """Returns the options that are given, or with `there=False` those that are not."""
    chosen = [name for name in names if (getattr(args, name) is not None) == there]
    return [f"`--{name.replace('_', '-')}`" for name in chosen]
