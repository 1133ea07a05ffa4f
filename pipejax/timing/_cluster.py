"""The description of a cluster that all timing models use: a few speeds."""

import dataclasses
import math
from collections.abc import Mapping

from pipejax._internal.numbers import number

from ._checks import check_count, check_seconds, check_speed, store


@dataclasses.dataclass(frozen=True)
class Link:
    """A network link with the same latency and bandwidth in both directions.

    A message of n bytes takes `latency + n / bandwidth` seconds.

    Attributes:
      latency: Seconds from sending the first byte of a message to receiving it.
      bandwidth: Bytes per second in each direction. `math.inf` is allowed.

    Raises:
      ValueError: If `latency` is negative or not finite, or `bandwidth` is not above 0.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        store(
            self,
            latency=check_seconds("latency", self.latency),
            bandwidth=check_speed("bandwidth", self.bandwidth),
        )


@dataclasses.dataclass(frozen=True)
class CodecSpeed:
    """The speed of a codec on one device, in bytes of float32 per second.

    Both speeds count the uncompressed bytes, 4 per element, so that codecs of different
    payloads can be compared. `math.inf` is for work that takes no time.

    Attributes:
      encode: Bytes of float32 that the device encodes per second.
      decode: Bytes of float32 that the device decodes payloads into per second.

    Raises:
      ValueError: If a speed is not above 0.
    """

    encode: float = math.inf
    decode: float = math.inf

    def __post_init__(self) -> None:
        for name, speed in dataclasses.asdict(self).items():
            store(self, **{name: check_speed(name, speed)})


@dataclasses.dataclass(frozen=True)
class Shares:
    """The share of a link's bandwidth that a device gets while it sends and receives.

    The share depends on the communication pattern. It is 1 if the two directions of the
    link are independent. With Gloo, which JAX uses between CPU processes, one device of
    a pair waits for the other, and each gets about 1/2 of the bandwidth.

    Attributes:
      pair: The share when two devices send to each other.
      shift: The share when each device sends to the next one and receives from the
        previous one, as in a ring of more than two devices.
      shuffle: The share when each device sends to all others, as in an all-to-all.

    Raises:
      ValueError: If a share is not above 0 and at most 1.
    """

    pair: float = 1.0
    shift: float = 1.0
    shuffle: float = 1.0

    def __post_init__(self) -> None:
        for name, share in dataclasses.asdict(self).items():
            if not 0 < number(share) <= 1:
                raise ValueError(
                    f"`{name}` must be a share of the bandwidth, above 0 and at most"
                    f" 1; got {share!r:.40}. Use 1 for a link whose two directions are"
                    " independent."
                )
            store(self, **{name: number(share)})


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster of equal hosts, described by the speeds of its links and devices.

    `pj.timing.calibrate` measures a cluster, and `pj.timing.assumed` assumes its
    speeds.

    Attributes:
      hosts: The number of hosts, at most 10^9.
      link: The link from each host to all others. The devices of a host share it.
      devices: The number of devices on each host, at most 10^9.
      inner: The link between two devices of one host; `None` if each host has a single
        device.
      reduction: `1 / gamma`, the bytes of float32 that a device adds to others per
        second; `math.inf` for additions that take no time.
      synchronisation: `S`, the seconds that each collective takes in addition to its
        messages: its launch, and the wait for the last device to arrive.
      shares: The share of a link's bandwidth that a device gets while it sends and
        receives.
      codecs: The speeds of codecs, under names that the caller chooses.

    Raises:
      ValueError: If a count, a time or a speed is out of range, or `inner` is `None`
        with several devices per host.
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
        store(
            self,
            hosts=check_count("hosts", self.hosts),
            devices=check_count("devices", self.devices),
            reduction=check_speed("reduction", self.reduction),
            synchronisation=check_seconds("synchronisation", self.synchronisation),
        )
        if self.devices > 1 and self.inner is None:
            raise ValueError(
                "`inner` must be the link between the devices of a host, of which there"
                f" are {self.devices}; got None. Give pj.timing.Link(latency,"
                " bandwidth)."
            )

    def shard(self, elements: int) -> int:
        """Returns the elements of one device if those of a host divide a vector.

        Args:
          elements: The number of elements of the vector.

        Examples:
          >>> import pipejax as pj
          >>> link, inner = pj.timing.Link(50e-6, 125e6), pj.timing.Link(1e-6, 1e11)
          >>> pj.timing.Cluster(2, link, devices=8, inner=inner).shard(10)
          2
        """
        return -(-elements // self.devices)

    def codec(self, name: str | None) -> CodecSpeed:
        """Returns the speed of a codec of this cluster.

        Args:
          name: A key of `codecs`. `None` stands for no codec, which takes no time.

        Raises:
          ValueError: If `codecs` has no such key.
        """
        if name is None:
            return CodecSpeed()
        if name not in self.codecs:
            raise ValueError(
                f"`codec` must be one of the cluster's codecs, {sorted(self.codecs)};"
                f" got {name!r}. Add its pj.timing.CodecSpeed to `Cluster.codecs`."
            )
        return self.codecs[name]
