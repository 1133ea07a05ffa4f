"""All-reduces in closed form: what each asks of the busiest device, and how long.

With p devices, n bytes of float32 each and no codec:

- ring: `2(p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma`
- halving-doubling: the same bytes, `2 log2(p) alpha`
- parameter server: `2 alpha + 2(p-1) n beta + (p-1) n gamma`

Each is a sum of counts times what one of them costs, so that the costs can be fitted to
measured times. The counts are those of `pipejax.collectives`, padding and all.

Reference: Li et al., Pipe-SGD, 2018, https://arxiv.org/abs/1811.03619
"""

from collections.abc import Sequence
from typing import NamedTuple

from pipejax.codecs import Codec

from ._cluster import Cluster, CodecSpeed, Link
from ._counts import Algorithm, Counts, form_of


class Exchange(NamedTuple):
    """An all-reduce: what crosses the links between hosts, and those inside.

    Attributes:
      between: hosts.
      inside: a host, between its devices.
    """

    between: Counts = Counts()
    inside: Counts = Counts()

    def plus(self, other: "Exchange") -> "Exchange":
        """Both, one after the other."""
        return Exchange(
            self.between.plus(other.between), self.inside.plus(other.inside)
        )


class Duration(NamedTuple):
    """Seconds of an all-reduce, by what they are spent on.

    Attributes:
      latency: of messages.
      wire: of bytes.
      reduction: of sums.
      codec: of encoding and decoding.
      synchronisation: of launching, and waiting for the last.
    """

    latency: float
    wire: float
    reduction: float
    codec: float
    synchronisation: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)

    @property
    def computed(self) -> float:
        """What a device's cores do themselves."""
        return self.reduction + self.codec


def duration(
    cluster: Cluster, exchange: Exchange, codec: str | None = None
) -> Duration:
    """How long an exchange takes on a cluster.

    Args:
      cluster: its speeds.
      exchange: what one of the closed forms counted.
      codec: whose speed it is, of `cluster.codecs`; `None` takes no time for it.

    Raises:
      ValueError: for a codec whose speed is not known.
    """
    speed = cluster.codec(codec)
    between = _seconds(cluster, cluster.link, exchange.between, speed)
    if cluster.inner is None:
        return between
    # Inside a host nothing is compressed but by `inner`, as fast as between hosts.
    inside = _seconds(cluster, cluster.inner, exchange.inside, speed)
    return Duration(*(a + b for a, b in zip(between, inside, strict=True)))


def _seconds(
    cluster: Cluster, link: Link, counts: Counts, speed: CodecSpeed
) -> Duration:
    shares = cluster.shares
    waits = (
        counts.paired * (1 / shares.pair - 1)
        + counts.shifted * (1 / shares.shift - 1)
        + counts.shuffled * (1 / shares.shuffle - 1)
    )
    return Duration(
        latency=counts.messages * link.latency,
        wire=(counts.wire + waits) / link.bandwidth,
        reduction=counts.summed / cluster.reduction,
        codec=counts.encoded / speed.encode + counts.decoded / speed.decode,
        synchronisation=counts.collectives * cluster.synchronisation,
    )


def flat(
    cluster: Cluster, algorithm: Algorithm, n: int, codec: Codec | None = None
) -> Exchange:
    """An all-reduce over all devices, host after host, that knows of no hosts.

    What crosses a host's link is counted; what goes on inside hosts is not, where there
    are several.

    Args:
      cluster: whose hosts and devices.
      algorithm: its name in `pipejax.collectives`.
      n: elements of each device's vector.
      codec: what travels; `None` sends all bits.

    Raises:
      ValueError: for an algorithm that is none.
    """
    counts = form_of(algorithm)(cluster.hosts * cluster.devices, n, codec)
    if cluster.devices == 1:
        return Exchange(counts)
    if cluster.hosts == 1:
        return Exchange(inside=counts)
    share = _crossing(algorithm, cluster.hosts, cluster.devices)
    return Exchange(_through_one_link(counts, share))


def _through_one_link(counts: Counts, devices: float) -> Counts:
    """Of a host, for so many of its devices' bytes."""
    return counts._replace(
        wire=counts.wire * devices,
        paired=counts.paired * devices,
        shifted=counts.shifted * devices,
        shuffled=counts.shuffled * devices,
    )


def _crossing(algorithm: Algorithm, hosts: int, devices: int) -> float:
    """Bytes over a host's link, of those that one of its devices sends."""
    p = hosts * devices
    match algorithm:
        case "psum" | "ring":
            return 1  # by the last device of each host
        case "two_shot" | "halving_doubling":
            return devices * (p - devices) / (p - 1)  # all but to their own host
        case "parameter_server":
            return (p - devices) / (p - 1)
        case "tree":
            return (hosts - 1).bit_length() / (p - 1).bit_length()


def hierarchical(
    cluster: Cluster,
    outer: Algorithm,
    n: int,
    codec: Codec | None = None,
    inner: Algorithm = "two_shot",
) -> Exchange:
    """Inside hosts without a codec, then between them, a d-th of the vector a device.

    Args:
      cluster: whose hosts and devices.
      outer: the algorithm between hosts.
      n: elements of each device's vector.
      codec: what travels between hosts; `None` sends all bits.
      inner: the algorithm inside hosts.

    Raises:
      ValueError: for an algorithm that is none.
    """
    inside = form_of(inner)(cluster.devices, n, None)
    piece = -(-n // cluster.devices)
    between = form_of(outer)(cluster.hosts, piece, codec)
    return Exchange(_through_one_link(between, cluster.devices), inside)


def per_leaf(
    cluster: Cluster,
    algorithm: Algorithm,
    sizes: Sequence[int],
    codec: Codec | None = None,
) -> Exchange:
    """An all-reduce for each leaf of the gradient, one after another."""
    total = Exchange()
    for n in sizes:
        total = total.plus(flat(cluster, algorithm, n, codec))
    return total
