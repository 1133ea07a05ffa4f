"""Exchanges on a cluster: counts on the busiest device, and the time they take.

Every duration is a sum of counts times costs, so that the costs can be fitted to
measured times. Exchanges inside hosts and between them are counted separately.
"""

import dataclasses
from typing import NamedTuple

from pipejax.codecs import Codec

from ._cluster import Cluster, CodecSpeed, Link
from ._counts import SENT, Counts, counted
from ._rounds import Algorithm


class ExchangeCounts(NamedTuple):
    """The counts of an exchange, separately for links between hosts and inside hosts.

    Attributes:
      between: The counts for the links between hosts.
      inside: The counts for the links between the devices of one host.
    """

    between: Counts = Counts()
    inside: Counts = Counts()


class Duration(NamedTuple):
    """The seconds of an exchange, split by what they are spent on.

    Attributes:
      latency: Seconds for the latencies of messages.
      wire: Seconds for the bytes on the links.
      reduction: Seconds to add vectors.
      codec: Seconds to encode and decode.
      synchronisation: Seconds to launch collectives and to wait for the last device.
    """

    latency: float
    wire: float
    reduction: float
    codec: float
    synchronisation: float

    @property
    def total(self) -> float:
        """The seconds of the whole exchange."""
        return sum(self)

    @property
    def fixed(self) -> float:
        """The seconds that do not depend on the number of bytes."""
        return self.latency + self.synchronisation

    @property
    def computed(self) -> float:
        """The seconds in which the device itself computes, `reduction + codec`."""
        return self.reduction + self.codec


def duration(
    cluster: Cluster, exchange: ExchangeCounts, codec: str | None = None
) -> Duration:
    r"""Returns how long an exchange takes, split by what the time is spent on.

    With m messages, b bytes on the wire, a bytes added and k collectives, an exchange
    without a codec takes

    $$m \alpha + b \beta + a \gamma + k S$$

    seconds. `alpha` and `1 / beta` are the latency and the bandwidth of the link,
    `1 / gamma` is `cluster.reduction`, and S is `cluster.synchronisation`. Bytes that a
    device sends while it receives cost `beta / share` (`pj.timing.Shares`). A codec
    adds the time to encode and decode. The seconds inside hosts are added to those
    between hosts.

    Args:
      cluster: The cluster with its speeds.
      exchange: The counts of the exchange, from `flat` or `hierarchical`.
      codec: The name in `cluster.codecs` of the codec that the exchange uses. `None`
        counts no time for encoding and decoding.

    Raises:
      ValueError: If `codec` is not a key of `cluster.codecs`.

    Examples:
      A ring over 4 hosts, with latencies of 50 microseconds and links of 1 Gbit/s:

      >>> import pipejax as pj
      >>> cluster = pj.timing.Cluster(4, pj.timing.Link(50e-6, 125e6))
      >>> exchange = pj.timing.flat(cluster, "ring", 1_000_000)
      >>> seconds = pj.timing.duration(cluster, exchange)
      >>> f"{1e3 * seconds.latency:.1f} ms + {1e3 * seconds.wire:.1f} ms"
      '0.3 ms + 48.0 ms'

    References:
      Thakur et al., Optimization of Collective Communication Operations in MPICH, 2005,
      https://doi.org/10.1177/1094342005051521

      Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
    """
    speed = cluster.codec(codec)
    between = _seconds(cluster, cluster.link, exchange.between, speed)
    if cluster.inner is None:
        return between
    # Only `flat` on a single host encodes anything inside a host. The codec is as fast
    # there as between hosts.
    inside = _seconds(cluster, cluster.inner, exchange.inside, speed)
    return Duration(*(a + b for a, b in zip(between, inside, strict=True)))


def mean_inside_hosts(cluster: Cluster, n: int) -> float:
    """Returns the seconds in which the devices of each host average their gradients.

    Every step has this mean if devices predict by the mean gradient of their host
    (`TrainConfig.predicts_by_host`), or if hosts take local steps.

    Args:
      cluster: The cluster. With one device on each host, there is nothing to average.
      n: The number of float32 elements of a gradient.

    Examples:
      >>> import pipejax as pj
      >>> link, inner = pj.timing.Link(50e-6, 125e6), pj.timing.Link(0.0, 1e9)
      >>> cluster = pj.timing.Cluster(2, link, devices=8, inner=inner)
      >>> f"{pj.timing.mean_inside_hosts(cluster, 10**6):.3f} s"
      '0.007 s'
    """
    if cluster.devices == 1:
        return 0.0
    inside = counted("psum", cluster.devices, n, None)
    return duration(cluster, ExchangeCounts(inside=inside)).total


def _seconds(
    cluster: Cluster, link: Link, counts: Counts, speed: CodecSpeed
) -> Duration:
    # `wire` has these bytes once, as if they had all of the link. With a share s, they
    # take 1/s times as long, which is 1/s - 1 more.
    shares = dataclasses.asdict(cluster.shares).items()
    waits = sum(getattr(counts, name) * (1 / share - 1) for name, share in shares)
    return Duration(
        latency=counts.messages * link.latency,
        wire=(counts.wire + waits) / link.bandwidth,
        reduction=counts.summed / cluster.reduction,
        codec=counts.encoded / speed.encode + counts.decoded / speed.decode,
        synchronisation=counts.collectives * cluster.synchronisation,
    )


def flat(
    cluster: Cluster, algorithm: Algorithm, n: int, codec: Codec | None = None
) -> ExchangeCounts:
    """Counts an all-reduce over all devices that ignores which host they are on.

    Ranks go host by host. With several hosts of several devices, only the bytes that
    cross a host's link are counted. `hierarchical` instead reduces inside each host
    first.

    Args:
      cluster: The cluster, for its number of hosts and devices.
      algorithm: The name of the algorithm in `pj.collectives`.
      n: The number of float32 elements of each device's vector.
      codec: The codec of the payloads; `None` sends float32.

    Returns:
      The counts at the busiest device. `inside` holds them for a single host with
      several devices, and `between` in all other cases.

    Raises:
      ValueError: If `algorithm` is not a key of `pj.timing.COST_MODELS`, or `n` is not
        a whole number above 0.

    Examples:
      >>> import pipejax as pj
      >>> cluster = pj.timing.Cluster(4, pj.timing.Link(50e-6, 125e6))
      >>> plain = pj.timing.flat(cluster, "two_shot", 1024)
      >>> int8 = pj.timing.flat(cluster, "two_shot", 1024, pj.codecs.int8())
      >>> plain.between.wire, int8.between.wire  # bytes
      (6144, 1560)

    References:
      Thakur et al., Optimization of Collective Communication Operations in MPICH, 2005,
      https://doi.org/10.1177/1094342005051521
    """
    counts = counted(algorithm, cluster.hosts * cluster.devices, n, codec)
    if cluster.devices == 1:
        return ExchangeCounts(counts)
    if cluster.hosts == 1:
        return ExchangeCounts(inside=counts)
    share = _crossing(algorithm, cluster.hosts, cluster.devices)
    return ExchangeCounts(through_one_link(counts, share))


def through_one_link(counts: Counts, devices: float) -> Counts:
    """Multiplies the bytes of one device by the devices that share a host's link."""
    sent = {name: devices * getattr(counts, name) for name in SENT}
    return counts._replace(**sent)


def _crossing(algorithm: Algorithm, hosts: int, devices: int) -> float:
    """Returns the bytes over a host's link per byte that the busiest device sends."""
    p = hosts * devices
    match algorithm:
        case "psum" | "ring":
            # Only the last device of each host sends to another host.
            return 1
        case "two_shot" | "halving_doubling":
            # Of p - 1 pieces that each device sends, p - devices go to other hosts.
            return devices * (p - devices) / (p - 1)
        case "parameter_server":
            # Of the p - 1 vectors, those of the server's own host do not cross its
            # link.
            return (p - devices) / (p - 1)
        case "tree":
            # Ranks go host by host, so only the last levels are between hosts.
            return (hosts - 1).bit_length() / (p - 1).bit_length()


def hierarchical(
    cluster: Cluster,
    outer: Algorithm,
    n: int,
    codec: Codec | None = None,
    inner: Algorithm = "two_shot",
) -> ExchangeCounts:
    """Counts an all-reduce inside hosts and one between hosts.

    With d devices per host, each device exchanges a d-th of the vector with the other
    hosts. A host's link therefore carries the all-reduce of one vector, whatever d is.
    The exchange inside hosts uses no codec.

    Args:
      cluster: The cluster, for its number of hosts and devices.
      outer: The name of the algorithm between hosts.
      n: The number of float32 elements of each device's vector.
      codec: The codec of the payloads between hosts; `None` sends float32.
      inner: The name of the algorithm inside hosts.

    Returns:
      The counts at the busiest device, inside hosts and between them.

    Raises:
      ValueError: If `outer` or `inner` is not a key of `pj.timing.COST_MODELS`, or `n`
        is not a whole number above 0.

    Examples:
      For two hosts with 8 devices each, a flat two-shot sends 8 times as many bytes
      over a host's link:

      >>> import pipejax as pj
      >>> from pipejax.timing import Link
      >>> link, inner = Link(50e-6, 125e6), Link(1e-6, 1e11)
      >>> cluster = pj.timing.Cluster(2, link, devices=8, inner=inner)
      >>> flat = pj.timing.flat(cluster, "two_shot", 10**6).between.wire
      >>> two = pj.timing.hierarchical(cluster, "two_shot", 10**6).between.wire
      >>> f"{1e-6 * flat:.0f} MB, {1e-6 * two:.0f} MB"
      '32 MB, 4 MB'

    References:
      Cho et al., BlueConnect, MLSys 2019,
      https://proceedings.mlsys.org/paper_files/paper/2019/hash/0c8abcf158ed12d0dd94480681186fda-Abstract.html
    """
    inside = counted(inner, cluster.devices, n, None)
    between = counted(outer, cluster.hosts, cluster.shard(n), codec)
    return ExchangeCounts(through_one_link(between, cluster.devices), inside)
