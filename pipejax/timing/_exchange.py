"""All-reduces in closed form: what each asks of the busiest device, and how long.

With p devices, n bytes of float32 each and no codec:

- ring: `2(p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma`
- halving-doubling: the same bytes, `2 log2(p) alpha`
- parameter server: `2 alpha + 2(p-1) n beta + (p-1) n gamma`

Each is a sum of counts times what one of them costs, so that the costs can be fitted to
measured times. The counts are those of `pipejax.collectives`, padding and all.

Reference: Li et al., Pipe-SGD, 2018, https://arxiv.org/abs/1811.03619
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from pipejax.codecs import Codec, Linear
from pipejax.codecs import cast as cast_to

from ._cluster import Cluster, CodecSpeed, Link

FLOAT32 = 4  # bytes


class Counts(NamedTuple):
    """What happens one after another, at the device that has most of it.

    Attributes:
      messages: that wait for the one before.
      wire: bytes through its link, in one direction.
      mutual: of these, bytes sent to a device that sends as many back meanwhile.
      summed: bytes of float32 added to others.
      encoded: bytes of float32 before they are sent.
      decoded: bytes of float32 out of what was sent.
      collectives: launched.
    """

    messages: float = 0
    wire: float = 0
    mutual: float = 0
    summed: float = 0
    encoded: float = 0
    decoded: float = 0
    collectives: float = 0

    def plus(self, other: "Counts") -> "Counts":
        """Both, one after the other."""
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


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
    waits = counts.mutual * (1 / cluster.duplex - 1)
    return Duration(
        latency=counts.messages * link.latency,
        wire=(counts.wire + waits) / link.bandwidth,
        reduction=counts.summed / cluster.reduction,
        codec=counts.encoded / speed.encode + counts.decoded / speed.decode,
        synchronisation=counts.collectives * cluster.synchronisation,
    )


Algorithm = Literal[
    "psum", "ring", "two_shot", "halving_doubling", "tree", "parameter_server"
]


def psum(p: int, n: int, codec: Codec | None = None) -> Counts:
    """The backend's own, taken for a ring; under a linear codec, one a round."""
    if p == 1:
        return Counts()
    if isinstance(codec, Linear) and codec.rounds:
        sizes: tuple[int, ...] = codec.round_sizes(n)
        done = sum(map(FLOAT32.__mul__, sizes))
        # Each round reads the whole vector, and so does the end.
        work = Counts(encoded=FLOAT32 * n * len(sizes), decoded=FLOAT32 * n)
    else:
        sizes, done, work = (n,), FLOAT32 * n, Counts()
    hops = 2 * (p - 1)
    return work.plus(
        Counts(
            messages=hops * len(sizes),
            wire=hops / p * done,
            summed=(p - 1) / p * done,
            collectives=len(sizes),
        )
    )


def ring(p: int, n: int, codec: Codec | None = None) -> Counts:
    """p-1 hops of partial sums and p-1 of sums, a p-th of the vector each."""
    piece = Piece.of(n, p, codec)
    hops = p - 1
    return Counts(
        messages=2 * hops,
        wire=2 * hops * piece.payload,
        mutual=2 * piece.payload if p == 2 else 0,  # the next is the one before
        summed=hops * piece.bytes,
        encoded=p * piece.coded,
        decoded=(hops + p) * piece.coded,
        collectives=2 * hops,
    )


def two_shot(p: int, n: int, codec: Codec | None = None) -> Counts:
    """An all_to_all and an all_gather: as many bytes as a ring, two collectives."""
    piece = Piece.of(n, p, codec)
    return Counts(
        messages=2 * (p - 1),
        wire=2 * (p - 1) * piece.payload,
        mutual=2 * piece.payload if p % 2 == 0 else 0,  # p/2 ranks on, p/2 back
        summed=(p - 1) * piece.bytes,
        encoded=(p + 1) * piece.coded,
        decoded=2 * p * piece.coded,
        collectives=2 if p > 1 else 0,
    )


def halving_doubling(p: int, n: int, codec: Codec | None = None) -> Counts:
    """Halves, quarters, ... and back; two more of all, where p is no power of 2."""
    q = 1 << (p.bit_length() - 1)
    piece, steps = Piece.of(n, q, codec), q.bit_length() - 1
    whole = Counts(
        messages=2 * steps,
        wire=2 * (q - 1) * piece.payload,
        mutual=2 * (q - 1) * piece.payload,
        summed=(q - 1) * piece.bytes,
        encoded=q * piece.coded,
        decoded=(2 * q - 1) * piece.coded,
        collectives=2 * steps,
    )
    if p == q:
        return whole
    fold = Counts(
        messages=2,
        wire=2 * q * piece.payload,
        summed=q * piece.bytes,
        encoded=q * piece.coded,
        decoded=q * piece.coded,
        collectives=2,
    )
    return whole.plus(fold)


def tree(p: int, n: int, codec: Codec | None = None) -> Counts:
    """Up and down a binomial tree, all of the vector at each level."""
    whole, levels = Piece.of(n, 1, codec), (p - 1).bit_length()
    return Counts(
        messages=2 * levels,
        wire=2 * levels * whole.payload,
        summed=levels * whole.bytes,
        encoded=(levels + 1) * whole.coded,
        decoded=(levels + 1) * whole.coded,
        collectives=2 * levels,
    )


def parameter_server(p: int, n: int, codec: Codec | None = None) -> Counts:
    """Everything over the link of one, which is a worker too; its messages queue."""
    whole = Piece.of(n, 1, codec)
    return Counts(
        messages=2 if p > 1 else 0,
        wire=2 * (p - 1) * whole.payload,
        summed=(p - 1) * whole.bytes,
        encoded=2 * whole.coded,
        decoded=(p + 1) * whole.coded,
        collectives=2 * (p - 1),
    )


FORMS: dict[Algorithm, Callable[[int, int, Codec | None], Counts]] = {
    "psum": psum,
    "ring": ring,
    "two_shot": two_shot,
    "halving_doubling": halving_doubling,
    "tree": tree,
    "parameter_server": parameter_server,
}


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
    counts = _form(algorithm)(cluster.hosts * cluster.devices, n, codec)
    if cluster.devices == 1:
        return Exchange(counts)
    if cluster.hosts == 1:
        return Exchange(inside=counts)
    share = _crossing(algorithm, cluster.hosts, cluster.devices)
    return Exchange(_through_one_link(counts, share))


def _through_one_link(counts: Counts, devices: float) -> Counts:
    """Of a host, for so many of its devices' bytes."""
    return counts._replace(wire=counts.wire * devices, mutual=counts.mutual * devices)


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
    inside = _form(inner)(cluster.devices, n, None)
    piece = -(-n // cluster.devices)
    between = _form(outer)(cluster.hosts, piece, codec)
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


class Piece(NamedTuple):
    """A part of the vector, with the zeros that a codec's blocks ask for.

    Attributes:
      bytes: of float32.
      coded: the same, or 0 where nothing is encoded.
      payload: bytes that travel.
    """

    bytes: int
    coded: int
    payload: int

    @classmethod
    def of(cls, n: int, pieces: int, codec: Codec | None) -> "Piece":
        multiple = 1 if codec is None else codec.multiple
        elements = multiple * max(1, -(-n // (pieces * multiple)))
        size = FLOAT32 * elements
        sent = (codec or cast_to("float32")).size(elements)
        return cls(size, 0 if codec is None else size, sent)


def _form(algorithm: Algorithm) -> Callable[[int, int, Codec | None], Counts]:
    if algorithm not in FORMS:
        raise ValueError(
            f"`algorithm` must be one of {', '.join(FORMS)}, got {algorithm!r}."
        )
    return FORMS[algorithm]
