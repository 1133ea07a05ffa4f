"""Closed forms of all-reduces: what each algorithm asks of the busiest device.

For p devices, n bytes of float32 on each and no codec:

- ring: `2(p-1)` messages, `2 (p-1)/p n` bytes on the link, `(p-1)/p n` bytes added.
- halving-doubling, p a power of two: `2 log2(p)` messages, and the bytes of a ring.
- parameter server: 2 messages, `2(p-1) n` bytes on the link, `(p-1) n` bytes added.

The counts are those of `pipejax.collectives`. They include the zeros with which the
collectives pad vectors. Under a codec, payloads travel in place of float32.

Reference: Li et al., Pipe-SGD, 2018, https://arxiv.org/abs/1811.03619
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from pipejax.codecs import Codec, Linear
from pipejax.codecs import cast as cast_to

FLOAT32 = 4  # bytes


class Counts(NamedTuple):
    """The work of an all-reduce on the busiest device: messages, bytes and additions.

    Only what happens one after another is counted, so that the time of an all-reduce is
    a sum of counts times costs (`pj.timing.duration`). The costs can therefore be
    fitted to measured times (`pj.timing.fit`).

    Attributes:
      messages: Messages that wait for the message before them, each for one latency.
      wire: Bytes through the device's link, in one direction.
      paired: The part of `wire` that the device sends to a device that sends as many
        bytes back at the same time.
      shifted: The part of `wire` that the device sends to one device while it receives
        as many bytes from another device.
      shuffled: The part of `wire` that belongs to an all-to-all.
      summed: Bytes of float32 that the device adds to others.
      encoded: Bytes of float32 that the device encodes. A linear codec with several
        rounds counts them once for all rounds.
      decoded: Bytes of float32 that the device decodes payloads into.
      collectives: Collectives that the program launches one after another.

    Examples:
      A ring of 4 devices with 1000 float32 elements each:

      >>> import pipejax as pj
      >>> counts = pj.timing.FORMS["ring"](4, 1000, None)
      >>> counts.messages, counts.wire, counts.summed
      (6, 6000, 3000)
    """

    messages: float = 0
    wire: float = 0
    paired: float = 0
    shifted: float = 0
    shuffled: float = 0
    summed: float = 0
    encoded: float = 0
    decoded: float = 0
    collectives: float = 0

    def plus(self, other: "Counts") -> "Counts":
        """Returns the counts of both all-reduces, run one after the other."""
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


Algorithm = Literal[
    "psum", "ring", "two_shot", "halving_doubling", "tree", "parameter_server"
]


def psum(p: int, n: int, codec: Codec | None = None) -> Counts:
    """Counts the backend's own all-reduce as if it were a ring in a single collective.

    A linear codec has one collective for each of its rounds. Other codecs are ignored,
    because `pipejax.collectives.psum` does not accept them.
    """
    if p == 1:
        return Counts()
    if isinstance(codec, Linear) and codec.rounds:
        sizes: tuple[int, ...] = codec.round_sizes(n)
        done = FLOAT32 * sum(sizes)
        # The payloads of a linear codec are added as they are. Each device encodes and
        # decodes once, and not at every hop.
        work = Counts(encoded=FLOAT32 * n, decoded=FLOAT32 * n)
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
    """Counts p-1 hops of partial sums and p-1 of sums, each a p-th of the vector."""
    piece = Piece.of(n, p, codec)
    hops = p - 1
    wire = 2 * hops * piece.payload
    return Counts(
        messages=2 * hops,
        wire=wire,
        # In a ring of two, the next device is also the previous one.
        paired=wire if p == 2 else 0,
        shifted=wire if p > 2 else 0,
        summed=hops * piece.bytes,
        # The p - 1 partial sums and the finished piece.
        encoded=p * piece.coded,
        # The p - 1 received partial sums, and then all p finished pieces.
        decoded=(hops + p) * piece.coded,
        collectives=2 * hops,
    )


def two_shot(p: int, n: int, codec: Codec | None = None) -> Counts:
    """Counts an all-to-all and an all-gather: a ring's bytes in two collectives."""
    piece = Piece.of(n, p, codec)
    return Counts(
        messages=2 * (p - 1),
        wire=2 * (p - 1) * piece.payload,
        # The all-to-all only: an all-gather sends the same payload to all.
        shuffled=(p - 1) * piece.payload,
        summed=(p - 1) * piece.bytes,
        # The p pieces of the device's own vector, and its piece of the sum.
        encoded=(p + 1) * piece.coded,
        # Its piece from each of p devices, and then the p pieces of the sum.
        decoded=2 * p * piece.coded,
        collectives=2 if p > 1 else 0,
    )


def halving_doubling(p: int, n: int, codec: Codec | None = None) -> Counts:
    """Counts exchanges of halves, quarters and so on between partners, and back.

    If p is not a power of two, two messages with the whole vector are added: the last
    devices send theirs to a partner first and receive the result at the end.
    """
    q = 1 << (p.bit_length() - 1)
    piece, steps = Piece.of(n, q, codec), q.bit_length() - 1
    whole = Counts(
        messages=2 * steps,
        # The halvings send q/2 + q/4 + ... + 1 = q - 1 pieces, and so do the doublings.
        wire=2 * (q - 1) * piece.payload,
        paired=2 * (q - 1) * piece.payload,
        summed=(q - 1) * piece.bytes,
        encoded=q * piece.coded,
        # The q - 1 pieces to add, and then all q finished pieces.
        decoded=(2 * q - 1) * piece.coded,
        collectives=2 * steps,
    )
    if p == q:
        return whole
    # One device encodes q pieces and sends them. Another then decodes and adds them,
    # and sends q pieces back at the end. The two wait for each other, so all of this
    # adds up.
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
    """Counts the whole vector at each level of a binomial tree, up and down."""
    whole, levels = Piece.of(n, 1, codec), (p - 1).bit_length()
    return Counts(
        messages=2 * levels,
        wire=2 * levels * whole.payload,
        summed=levels * whole.bytes,
        # One device after another encodes: at each level one, and at last the root.
        encoded=(levels + 1) * whole.coded,
        decoded=(levels + 1) * whole.coded,
        collectives=2 * levels,
    )


def parameter_server(p: int, n: int, codec: Codec | None = None) -> Counts:
    """Counts p-1 vectors to the server, which is also a worker, and p-1 from it.

    The messages queue at the server's link. A message that queues does not wait for
    another latency, so that only two latencies are counted.
    """
    whole = Piece.of(n, 1, codec)
    return Counts(
        messages=2 if p > 1 else 0,
        wire=2 * (p - 1) * whole.payload,
        summed=(p - 1) * whole.bytes,
        # All workers encode at once, and the server encodes after them.
        encoded=2 * whole.coded,
        # The server decodes p vectors, and the workers then decode one at once.
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
"""The closed form of each algorithm, by its name in `pj.collectives`.

A form takes the number p of devices, the number n of float32 elements on each device,
and a codec or `None`. It returns `Counts`.
"""


def form_of(algorithm: Algorithm) -> Callable[[int, int, Codec | None], Counts]:
    if algorithm not in FORMS:
        raise ValueError(
            f"`algorithm` must be one of {', '.join(FORMS)}, got {algorithm!r}."
        )
    return FORMS[algorithm]


# These algorithms send the whole vector. All others cut it into pieces.
WHOLE = ("psum", "tree", "parameter_server")


def compatible(
    algorithm: Algorithm, codec: Codec | None, *, levels: bool = False
) -> bool:
    """Returns whether an algorithm accepts a codec.

    `psum` adds payloads without decoding them, so that it accepts linear codecs only. A
    codec that needs whole leaves, such as `power_sgd`, works only with algorithms that
    do not cut the vector: `psum`, `tree` and `parameter_server`.

    Args:
      algorithm: The name of the algorithm in `pj.collectives`.
      codec: The codec, or `None`, which every algorithm accepts.
      levels: Whether the algorithm runs between the hosts of `hierarchical`. It then
        gets a piece of the vector and not whole leaves.

    Examples:
      >>> import pipejax as pj
      >>> pj.timing.compatible("psum", pj.codecs.int8())
      False
      >>> pj.timing.compatible("ring", pj.codecs.int8())
      True
    """
    if codec is None:
        return True
    whole = algorithm in WHOLE and not levels
    return (algorithm != "psum" or codec.rounds > 0) and (
        whole or not codec.needs_leaves
    )


class Piece(NamedTuple):
    """The size of one piece of a vector, padded to the padding multiple of a codec.

    Attributes:
      bytes: The piece in bytes of float32, with its padding.
      coded: The bytes of float32 that are encoded: `bytes`, or 0 without a codec.
      payload: The bytes of the piece's payload.
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
