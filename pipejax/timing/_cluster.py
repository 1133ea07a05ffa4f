"""What a cluster is to a timing model: a few speeds."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pipejax.integers import is_integer


@dataclasses.dataclass(frozen=True)
class Link:
    """What joins two places, the same in both directions.

    Attributes:
      latency: alpha, seconds from the first byte sent to the first received.
      bandwidth: 1/beta, bytes a second.

    Raises:
      ValueError: for a latency below 0, or a bandwidth that is not above it.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        check_seconds("latency", self.latency)
        _check_speed("bandwidth", self.bandwidth)


@dataclasses.dataclass(frozen=True)
class CodecSpeed:
    """How fast a device compresses, in bytes of float32 a second.

    Attributes:
      encode: of what is to be sent.
      decode: of what comes out.

    Raises:
      ValueError: for a speed that is not above 0.
    """

    encode: float = math.inf
    decode: float = math.inf

    def __post_init__(self) -> None:
        _check_speed("encode", self.encode)
        _check_speed("decode", self.decode)


@dataclasses.dataclass(frozen=True)
class Shares:
    """Of a link's bandwidth in one direction, what devices get that also receive.

    All 1 where the two directions know nothing of each other. With Gloo, behind JAX on
    CPUs, of a pair one waits for the other: some 1/2.

    Attributes:
      pair: two devices send to each other.
      shift: each sends to the next and receives from the one before.
      shuffle: each sends to all others, an all-to-all.

    Raises:
      ValueError: for a share that is not above 0 and at most 1.
    """

    pair: float = 1.0
    shift: float = 1.0
    shuffle: float = 1.0

    def __post_init__(self) -> None:
        for name, share in dataclasses.asdict(self).items():
            if not (_is_number(share) and 0 < share <= 1):
                raise ValueError(
                    f"`{name}` must be a share of the bandwidth, above 0 and at most"
                    f" 1, got {share!r}. 1 is a link whose two directions know nothing"
                    " of each other."
                )


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts, what joins them, and what their devices do with bytes.

    Attributes:
      hosts: how many.
      link: of each host to all others, shared by its devices.
      devices: of each host.
      inner: between the devices of one host; `None` where each has one device.
      reduction: 1/gamma, bytes of float32 that a device adds to others a second.
      synchronisation: S, seconds that a collective takes beside its messages: to be
        launched, and to wait for the last to come.
      shares: of a link's bandwidth, by who sends to whom.
      codecs: how fast each is, by a name of the caller's.

    Raises:
      ValueError: for a number that no cluster has.
    """

    hosts: int
    link: Link
    devices: int = 1
    inner: Link | None = None
    reduction: float = math.inf
    synchronisation: float = 0.0
    shares: Shares = dataclasses.field(default_factory=Shares)
    codecs: Mapping[str, CodecSpeed] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_count("hosts", self.hosts)
        _check_count("devices", self.devices)
        _check_speed("reduction", self.reduction)
        check_seconds("synchronisation", self.synchronisation)
        if self.devices > 1 and self.inner is None:
            raise ValueError(
                "`inner` must say what joins the devices of a host, of which there are"
                f" {self.devices}; got None. Give pj.timing.Link(latency, bandwidth)."
            )

    def codec(self, name: str | None) -> CodecSpeed:
        """How fast the codec of that name is; `None` is no codec, and takes no time."""
        if name is None:
            return CodecSpeed()
        if name not in self.codecs:
            raise ValueError(
                f"`codec` must be one of the cluster's, {sorted(self.codecs)}; got"
                f" {name!r}. Add its pj.timing.CodecSpeed to `Cluster.codecs`."
            )
        return self.codecs[name]


def _check_count(argument: str, value: Any) -> None:
    if not is_integer(value, 1):
        raise ValueError(
            f"`{argument}` must be a whole number of at least 1, got {value!r}."
        )


def check_seconds(argument: str, value: Any) -> None:
    if not (_is_number(value) and 0 <= value < math.inf):
        raise ValueError(
            f"`{argument}` must be seconds, 0 or more, got {value!r}. 50 microseconds"
            " are 50e-6."
        )


def _check_speed(argument: str, value: Any) -> None:
    if not (_is_number(value) and value > 0):
        raise ValueError(
            f"`{argument}` must be bytes a second, above 0, got {value!r}. 1 Gbit/s is"
            " 125e6; math.inf takes no time."
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
