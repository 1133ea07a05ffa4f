"""All-reduces as rounds of messages, for what no closed form says: who waits for whom.

A ring is 2(p-1) rounds in which every device sends to the next; a parameter server as
many with one message each.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from pipejax.codecs import Codec

from ._cluster import Cluster, Shares
from ._counts import Algorithm, Piece

Kind = Literal["stream", "pair", "shift", "shuffle"]


class Round(NamedTuple):
    """Messages that go at the same time, at most one from and to each device.

    Attributes:
      senders: ranks [m].
      receivers: of each, ranks [m].
      bytes: of each.
      kind: who sends to whom, as `pj.timing.Shares` has it; a stream has all of a link.
      before: seconds that a sender works for it.
      after: seconds that a receiver then works on it.
    """

    senders: np.ndarray
    receivers: np.ndarray
    bytes: float
    kind: Kind = "stream"
    before: float = 0.0
    after: float = 0.0

    def share(self, shares: Shares) -> float:
        """Of a link's bandwidth."""
        return 1.0 if self.kind == "stream" else getattr(shares, self.kind)


class Work(NamedTuple):
    """Seconds for so many bytes of float32."""

    encode: Callable[[float], float]
    decode: Callable[[float], float]
    add: Callable[[float], float]

    @classmethod
    def of(cls, cluster: Cluster, codec: str | None) -> "Work":
        """By the cluster's speeds."""
        speed = cluster.codec(codec)
        return cls(
            lambda size: size / speed.encode,
            lambda size: size / speed.decode,
            lambda size: size / cluster.reduction,
        )


def rounds(
    algorithm: Algorithm, p: int, n: int, codec: Codec | None, work: Work
) -> Iterator[Round]:
    """An all-reduce of n elements over p devices.

    The two-shot's collectives are p-1 rounds each, of which the d-th goes d ranks on.
    """
    return _ROUNDS[algorithm](p, n, codec, work)


def _psum(p: int, n: int, codec: Codec | None, work: Work) -> Iterator[Round]:
    return _hops(p, Piece.of(n, p, codec), work, "stream")


def _ring(p: int, n: int, codec: Codec | None, work: Work) -> Iterator[Round]:
    kind: Kind = "pair" if p == 2 else "shift"
    return _hops(p, Piece.of(n, p, codec), work, kind)


def _hops(p: int, piece: Piece, work: Work, kind: Kind) -> Iterator[Round]:
    every = np.arange(p)
    before = work.encode(piece.coded)
    after = work.decode(piece.coded) + work.add(piece.bytes)
    for _ in range(p - 1):
        yield Round(every, (every + 1) % p, piece.payload, kind, before, after)
    yield _local(p, before=before)
    for _ in range(p - 1):
        yield Round(every, (every + 1) % p, piece.payload, kind)
    yield _local(p, before=p * work.decode(piece.coded))


def _two_shot(p: int, n: int, codec: Codec | None, work: Work) -> Iterator[Round]:
    piece, every = Piece.of(n, p, codec), np.arange(p)
    yield _local(p, before=p * work.encode(piece.coded))
    for distance in range(1, p):
        yield Round(every, (every + distance) % p, piece.payload, "shuffle")
    sums = p * work.decode(piece.coded) + (p - 1) * work.add(piece.bytes)
    yield _local(p, before=sums + work.encode(piece.coded))
    for distance in range(1, p):
        yield Round(every, (every + distance) % p, piece.payload)
    yield _local(p, before=p * work.decode(piece.coded))


def _halving_doubling(
    p: int, n: int, codec: Codec | None, work: Work
) -> Iterator[Round]:
    q = 1 << (p.bit_length() - 1)
    piece, some, rest = Piece.of(n, q, codec), np.arange(q), np.arange(q, p)
    after = work.decode(piece.coded) + work.add(piece.bytes)
    if rest.size:
        before = q * work.encode(piece.coded)
        yield Round(rest, rest - q, q * piece.payload, "stream", before, q * after)
    distances = [1 << i for i in range(q.bit_length() - 1)]
    for d in reversed(distances):
        before = d * work.encode(piece.coded)
        yield Round(some, some ^ d, d * piece.payload, "pair", before, d * after)
    yield _local(p, before=work.encode(piece.coded))
    for d in distances:
        yield Round(some, some ^ d, d * piece.payload, "pair")
    if rest.size:
        yield Round(rest - q, rest, q * piece.payload)
    yield _local(p, before=q * work.decode(piece.coded))


def _tree(p: int, n: int, codec: Codec | None, work: Work) -> Iterator[Round]:
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
    p: int, n: int, codec: Codec | None, work: Work
) -> Iterator[Round]:
    whole, server = Piece.of(n, 1, codec), np.zeros(1, int)
    encode, decode = work.encode(whole.coded), work.decode(whole.coded)
    yield _local(p, before=encode)
    for rank in range(1, p):
        yield Round(server + rank, server, whole.payload)
    yield _local(1, before=p * decode + (p - 1) * work.add(whole.bytes) + encode)
    for rank in range(1, p):
        yield Round(server, server + rank, whole.payload)
    yield _local(p, before=decode)


def _local(p: int, before: float) -> Round:
    """Work of the first p devices, and no message."""
    return Round(np.arange(p), np.zeros(0, int), 0.0, before=before)


_ROUNDS: dict[Algorithm, Callable[[int, int, Codec | None, Work], Iterator[Round]]] = {
    "psum": _psum,
    "ring": _ring,
    "two_shot": _two_shot,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
    "parameter_server": _parameter_server,
}
