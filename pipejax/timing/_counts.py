"""All-reduces in closed form: what each asks of the busiest device.

With p devices and n bytes of float32 each, no codec:

- ring: `2(p-1)` messages, `2 (p-1)/p n` bytes on a link, `(p-1)/p n` added
- halving-doubling: the same bytes, `2 log2(p)` messages
- parameter server: `2(p-1) n` bytes on one link, `(p-1) n` added

They are the counts of `pipejax.collectives`, padding and all.

Reference: Li et al., Pipe-SGD, 2018, https://arxiv.org/abs/1811.03619
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from pipejax.codecs import Codec, Linear
from pipejax.codecs import cast as cast_to

FLOAT32 = 4  # bytes


class Counts(NamedTuple):
    """What happens one after another, at the device that has most of it.

    Attributes:
      messages: that wait for the one before.
      wire: bytes through its link, in one direction.
      paired: of these, bytes sent to a device that sends as many back meanwhile.
      shifted: of these, bytes sent to one device while as many come from another.
      shuffled: of these, bytes of an all-to-all.
      summed: bytes of float32 added to others.
      encoded: bytes of float32 before they are sent; once for all rounds of a codec.
      decoded: bytes of float32 out of what was sent.
      collectives: launched.
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
        """Both, one after the other."""
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


Algorithm = Literal[
    "psum", "ring", "two_shot", "halving_doubling", "tree", "parameter_server"
]


def psum(p: int, n: int, codec: Codec | None = None) -> Counts:
    """The backend's own, taken for a ring; under a linear codec, one a round."""
    if p == 1:
        return Counts()
    if isinstance(codec, Linear) and codec.rounds:
        sizes: tuple[int, ...] = codec.round_sizes(n)
        done = FLOAT32 * sum(sizes)
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
    """p-1 hops of partial sums and p-1 of sums, a p-th of the vector each."""
    piece = Piece.of(n, p, codec)
    hops = p - 1
    wire = 2 * hops * piece.payload
    return Counts(
        messages=2 * hops,
        wire=wire,
        paired=wire if p == 2 else 0,  # the next is the one before
        shifted=wire if p > 2 else 0,
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
        shuffled=(p - 1) * piece.payload,
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
        paired=2 * (q - 1) * piece.payload,
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


def form_of(algorithm: Algorithm) -> Callable[[int, int, Codec | None], Counts]:
    if algorithm not in FORMS:
        raise ValueError(
            f"`algorithm` must be one of {', '.join(FORMS)}, got {algorithm!r}."
        )
    return FORMS[algorithm]


# Algorithms that send the vector whole; all others cut it into pieces.
WHOLE = ("psum", "tree", "parameter_server")


def compatible(
    algorithm: Algorithm, codec: Codec | None, *, levels: bool = False
) -> bool:
    """Whether an algorithm takes a codec.

    `psum` adds payloads unread and takes linear codecs alone. A codec that needs whole
    leaves, `power_sgd`, is for algorithms that do not cut the vector.

    Args:
      algorithm: its name.
      codec: or `None`, which goes with all.
      levels: whether the algorithm is the one between hosts of `hierarchical`, which
        has a piece of the vector.
    """
    if codec is None:
        return True
    whole = algorithm in WHOLE and not levels
    return (algorithm != "psum" or codec.rounds > 0) and (
        whole or not codec.needs_leaves
    )


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
