"""All-reduces as rounds of messages, from which they are counted and simulated.

A round says which device waits for which: a ring has 2(p-1) rounds in which every
device sends to the next one. The sizes are those of `pipejax.collectives`, and include
the zeros with which the collectives pad vectors. Under a codec, payloads travel in
place of float32.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from pipejax.codecs import Codec, Linear, cast

FLOAT32 = 4  # bytes

Algorithm = Literal[
    "psum", "ring", "two_shot", "halving_doubling", "tree", "parameter_server"
]
# A pattern of `Shares`. A stream gets all of the bandwidth.
Pattern = Literal["stream", "pair", "shift", "shuffle"]
Pairs = Callable[[int], tuple[np.ndarray, np.ndarray]]


class Work(NamedTuple):
    """Bytes of float32 that a device encodes, decodes payloads into, and adds."""

    encoded: float = 0
    decoded: float = 0
    summed: float = 0


class Round(NamedTuple):
    """Messages that are sent at the same time, and the work before and after them.

    Each device sends at most one message and receives at most one.
    """

    pairs: Pairs  # ranks of senders and receivers in repetition i
    payload: float  # bytes of each message
    pattern: Pattern = "stream"
    before: Work = Work()  # what each sender does
    after: Work = Work()  # what each receiver does
    repeat: int = 1
    messages: int = 1  # latencies of all repetitions together
    collectives: int = 1  # of all repetitions together


class Chunk(NamedTuple):
    """The sizes in bytes of a piece of a vector, padded to whole blocks of a codec."""

    bytes: int  # of float32, with the padding
    coded: int  # `bytes`, or 0 without a codec
    payload: int

    @classmethod
    def of(cls, n: int, pieces: int, codec: Codec | None) -> "Chunk":
        multiple = 1 if codec is None else codec.multiple
        elements = multiple * max(1, -(-n // (pieces * multiple)))
        size = FLOAT32 * elements
        sent = (codec or cast("float32")).size(elements)
        return cls(size, 0 if codec is None else size, sent)


def psum(p: int, n: int, codec: Codec | None) -> list[Round]:
    """Counts the backend's all-reduce as a ring in a single collective.

    A linear codec has a collective for each of its rounds, whose payloads are added as
    they are. Other codecs are ignored, because `pipejax.collectives.psum` does not
    accept them.
    """
    if p == 1:
        return []
    linear = codec if isinstance(codec, Linear) and codec.rounds else None
    rounds = []
    for elements in linear.round_sizes(n) if linear else (n,):
        # The backend does not say how it cuts a vector that p does not divide.
        part = FLOAT32 * elements / p
        gather = Round(_next(p), part, repeat=p - 1, messages=p - 1, collectives=0)
        rounds += [gather._replace(after=Work(summed=part), collectives=1), gather]
    work = FLOAT32 * n if linear else 0
    return [_local(p, encoded=work), *rounds, _local(p, decoded=work)]


def ring(p: int, n: int, codec: Codec | None) -> list[Round]:
    """Has p-1 hops of partial sums and p-1 of sums, each a p-th of the vector."""
    size, coded, payload = Chunk.of(n, p, codec)
    # In a ring of two, the next device is also the previous one.
    pattern: Pattern = "pair" if p == 2 else "shift"
    hops = p - 1
    hop = Round(
        _next(p), payload, pattern, repeat=hops, messages=hops, collectives=hops
    )
    add = Work(decoded=coded, summed=size)
    return [
        hop._replace(before=Work(encoded=coded), after=add),
        _local(p, encoded=coded),
        hop,
        _local(p, decoded=p * coded),
    ]


def two_shot(p: int, n: int, codec: Codec | None) -> list[Round]:
    """Has an all-to-all and an all-gather: a ring's bytes in two collectives."""
    size, coded, payload = Chunk.of(n, p, codec)

    def pairs(i: int) -> tuple[np.ndarray, np.ndarray]:
        # In round i, each device sends to the device i + 1 ranks further on. Thus each
        # sends and receives one message in every round.
        return np.arange(p), (np.arange(p) + i + 1) % p

    gather = Round(
        pairs, payload, repeat=p - 1, messages=p - 1, collectives=min(1, p - 1)
    )
    return [
        _local(p, encoded=p * coded),
        # Only the all-to-all shuffles: an all-gather sends the same payload to all.
        gather._replace(pattern="shuffle"),
        _local(p, encoded=coded, decoded=p * coded, summed=(p - 1) * size),
        gather,
        _local(p, decoded=p * coded),
    ]


def halving_doubling(p: int, n: int, codec: Codec | None) -> list[Round]:
    """Exchanges halves, quarters and so on between q partners, and back.

    If p is not a power of two, q is the next smaller one. The last p - q devices first
    send their whole vectors to a partner, and receive the result at the end.
    """
    q = 1 << (p.bit_length() - 1)
    size, coded, payload = Chunk.of(n, q, codec)

    def send(pieces: int, pairs: Pairs, pattern: Pattern) -> Round:
        add = Work(decoded=pieces * coded, summed=pieces * size)
        encode = Work(encoded=pieces * coded)
        return Round(pairs, pieces * payload, pattern, encode, add)

    def partners(d: int) -> Round:
        return send(d, lambda i: (np.arange(q), np.arange(q) ^ d), "pair")

    halvings = [partners(q >> level) for level in range(1, q.bit_length())]
    if p > q:
        fold = send(q, lambda i: (np.arange(q, p), np.arange(p - q)), "stream")
        halvings.insert(0, fold)
    return [
        *halvings,
        _local(p, encoded=coded),
        *map(_back, reversed(halvings)),
        _local(p, decoded=q * coded),
    ]


def tree(p: int, n: int, codec: Codec | None) -> list[Round]:
    """Sends the whole vector at each level of a binomial tree, up and down."""
    size, coded, payload = Chunk.of(n, 1, codec)

    def level(d: int) -> Round:
        return Round(
            lambda i: (np.arange(d, p, 2 * d), np.arange(0, p - d, 2 * d)),
            payload,
            before=Work(encoded=coded),
            after=Work(decoded=coded, summed=size),
        )

    up = [level(1 << i) for i in range((p - 1).bit_length())]
    root, last = _local(p, encoded=coded), _local(p, decoded=coded)
    return [*up, root, *map(_back, reversed(up)), last]


def parameter_server(p: int, n: int, codec: Codec | None) -> list[Round]:
    """Sends p-1 vectors to the server, which is also a worker, and p-1 from it."""
    size, coded, payload = Chunk.of(n, 1, codec)

    def pairs(i: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([i + 1]), np.array([0])

    # Messages queue at the server's link. One that queues does not wait for another
    # latency, so that only two latencies are counted.
    up = Round(pairs, payload, repeat=p - 1, messages=min(1, p - 1), collectives=p - 1)
    return [
        _local(p, encoded=coded),
        up,
        # The server alone decodes the vectors of all p devices, its own among them.
        _local(1, encoded=coded, decoded=p * coded, summed=(p - 1) * size),
        _back(up),
        _local(p, decoded=coded),
    ]


ROUNDS: dict[Algorithm, Callable[[int, int, Codec | None], list[Round]]] = {
    "psum": psum,
    "ring": ring,
    "two_shot": two_shot,
    "halving_doubling": halving_doubling,
    "tree": tree,
    "parameter_server": parameter_server,
}
"""For each algorithm, the rounds on p devices with n elements each and a codec."""


def _local(devices: int, **work: float) -> Round:
    """Returns a round in which the first devices work and send no message."""
    idle = np.zeros(0, int)
    return Round(
        lambda i: (np.arange(devices), idle),
        payload=0,
        before=Work(**work),
        messages=0,
        collectives=0,
    )


def _back(there: Round) -> Round:
    """Returns the reverse round, in which receivers send payloads without any work."""
    return there._replace(
        pairs=lambda i: there.pairs(i)[::-1], before=Work(), after=Work()
    )


def _next(p: int) -> Pairs:
    return lambda i: (np.arange(p), (np.arange(p) + 1) % p)
