"""All-reduces as rounds of messages, for the simulation of a cluster.

Unlike a closed form, rounds say which device waits for which. A ring has 2(p-1) rounds
in which every device sends to the next one. A parameter server has as many rounds, each
with a single message.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from pipejax.codecs import Codec

from ._cluster import Cluster, Shares
from ._counts import Algorithm, Piece

Kind = Literal["stream", "pair", "shift", "shuffle"]


class Round(NamedTuple):
    """Messages that are sent at the same time, with the work around them.

    Each device sends at most one message in a round and receives at most one.

    Attributes:
      senders: The ranks of the senders; without messages, of the devices that work.
      receivers: The rank that receives each message.
      bytes: The bytes of each message.
      kind: A pattern of `Shares`, or `"stream"`, which gets all of the bandwidth.
      before: Seconds that each sender works before it sends.
      after: Seconds that each receiver works after it has received the message.
    """

    senders: np.ndarray
    receivers: np.ndarray
    bytes: float
    kind: Kind = "stream"
    before: float = 0.0
    after: float = 0.0

    def share(self, shares: Shares) -> float:
        return 1.0 if self.kind == "stream" else getattr(shares, self.kind)


class WorkSeconds(NamedTuple):
    """Functions from bytes of float32 to the seconds that a device works on them."""

    encode: Callable[[float], float]
    decode: Callable[[float], float]
    add: Callable[[float], float]

    @classmethod
    def of(cls, cluster: Cluster, codec: str | None) -> "WorkSeconds":
        speed = cluster.codec(codec)
        return cls(
            lambda size: size / speed.encode,
            lambda size: size / speed.decode,
            lambda size: size / cluster.reduction,
        )


def rounds(
    algorithm: Algorithm, p: int, n: int, codec: Codec | None, work: WorkSeconds
) -> Iterator[Round]:
    """Yields the rounds of an all-reduce of n float32 elements over p devices."""
    return _ROUNDS[algorithm](p, n, codec, work)


def _psum(p: int, n: int, codec: Codec | None, work: WorkSeconds) -> Iterator[Round]:
    """Yields the rounds of the backend's all-reduce, which is taken for a ring."""
    return _hops(p, Piece.of(n, p, codec), work, "stream")


def _ring(p: int, n: int, codec: Codec | None, work: WorkSeconds) -> Iterator[Round]:
    kind: Kind = "pair" if p == 2 else "shift"
    return _hops(p, Piece.of(n, p, codec), work, kind)


def _hops(p: int, piece: Piece, work: WorkSeconds, kind: Kind) -> Iterator[Round]:
    """Yields p-1 hops of partial sums and p-1 hops of finished pieces."""
    every = np.arange(p)
    before = work.encode(piece.coded)
    after = work.decode(piece.coded) + work.add(piece.bytes)
    for _ in range(p - 1):
        yield Round(every, (every + 1) % p, piece.payload, kind, before, after)
    yield _local(p, before=before)
    for _ in range(p - 1):
        yield Round(every, (every + 1) % p, piece.payload, kind)
    yield _local(p, before=p * work.decode(piece.coded))


def _two_shot(
    p: int, n: int, codec: Codec | None, work: WorkSeconds
) -> Iterator[Round]:
    piece, every = Piece.of(n, p, codec), np.arange(p)
    yield _local(p, before=p * work.encode(piece.coded))
    # In round d, each device sends to the device d ranks further on. Thus each sends
    # and receives one message in every round.
    for distance in range(1, p):
        yield Round(every, (every + distance) % p, piece.payload, "shuffle")
    sums = p * work.decode(piece.coded) + (p - 1) * work.add(piece.bytes)
    yield _local(p, before=sums + work.encode(piece.coded))
    for distance in range(1, p):
        yield Round(every, (every + distance) % p, piece.payload)
    yield _local(p, before=p * work.decode(piece.coded))


def _halving_doubling(
    p: int, n: int, codec: Codec | None, work: WorkSeconds
) -> Iterator[Round]:
    """Yields the rounds of halving and doubling over q devices, a power of two."""
    q = 1 << (p.bit_length() - 1)
    piece, some, rest = Piece.of(n, q, codec), np.arange(q), np.arange(q, p)
    after = work.decode(piece.coded) + work.add(piece.bytes)
    # The last p - q devices first send their vectors to a partner, and receive the
    # result at the end.
    if rest.size:
        before = q * work.encode(piece.coded)
        yield Round(rest, rest - q, q * piece.payload, "stream", before, q * after)
    distances = [1 << i for i in range(q.bit_length() - 1)]
    for d in reversed(distances):
        # At distance d, a device sends d pieces, and adds as many.
        before = d * work.encode(piece.coded)
        yield Round(some, some ^ d, d * piece.payload, "pair", before, d * after)
    yield _local(p, before=work.encode(piece.coded))
    for d in distances:
        yield Round(some, some ^ d, d * piece.payload, "pair")
    if rest.size:
        yield Round(rest - q, rest, q * piece.payload)
    yield _local(p, before=q * work.decode(piece.coded))


def _tree(p: int, n: int, codec: Codec | None, work: WorkSeconds) -> Iterator[Round]:
    whole = Piece.of(n, 1, codec)
    encode, decode = work.encode(whole.coded), work.decode(whole.coded)
    distances = [1 << i for i in range((p - 1).bit_length())]
    pairs = [(low := np.arange(0, p - d, 2 * d), low + d) for d in distances]
    after = decode + work.add(whole.bytes)
    for low, high in pairs:
        yield Round(high, low, whole.payload, "stream", encode, after)
    yield _local(p, before=encode)
    for low, high in reversed(pairs):
        yield Round(low, high, whole.payload)
    yield _local(p, before=decode)


def _parameter_server(
    p: int, n: int, codec: Codec | None, work: WorkSeconds
) -> Iterator[Round]:
    """Yields one message after another to the server, and then from the server."""
    whole, server = Piece.of(n, 1, codec), np.zeros(1, int)
    encode, decode = work.encode(whole.coded), work.decode(whole.coded)
    yield _local(p, before=encode)
    for rank in range(1, p):
        yield Round(server + rank, server, whole.payload)
    # The server alone decodes the vectors of all p devices, its own among them.
    yield _local(1, before=p * decode + (p - 1) * work.add(whole.bytes) + encode)
    for rank in range(1, p):
        yield Round(server, server + rank, whole.payload)
    yield _local(p, before=decode)


def _local(p: int, before: float) -> Round:
    """Returns a round in which the first p devices work and send no message."""
    return Round(np.arange(p), np.zeros(0, int), 0.0, before=before)


_Rounds = Callable[[int, int, Codec | None, WorkSeconds], Iterator[Round]]
_ROUNDS: dict[Algorithm, _Rounds] = {
    "psum": _psum,
    "ring": _ring,
    "two_shot": _two_shot,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
    "parameter_server": _parameter_server,
}
