"""Closed forms of all-reduces: what each algorithm asks of the busiest device."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from pipejax.codecs import Codec

from ._checks import check_elements
from ._rounds import ROUNDS, Algorithm


class Counts(NamedTuple):
    """The work of an all-reduce on the busiest device: messages, bytes and additions.

    Only what happens one after another is counted, so that the time of an all-reduce is
    a sum of counts times costs (`pj.timing.duration`). The costs can therefore be
    fitted to measured times (`pj.timing.fit`).

    Attributes:
      messages: Messages that wait for the message before them, each for one latency.
      wire: Bytes through the device's link, in one direction.
      pair: The part of `wire` that the device sends to a device that sends as many
        bytes back at the same time.
      shift: The part of `wire` that the device sends to one device while it receives as
        many bytes from another device.
      shuffle: The part of `wire` that belongs to an all-to-all.
      summed: Bytes of float32 that the device adds to others.
      encoded: Bytes of float32 that the device encodes. A linear codec with several
        rounds counts them once for all rounds.
      decoded: Bytes of float32 that the device decodes payloads into.
      collectives: Collectives that the program launches one after another.
    """

    messages: float = 0
    wire: float = 0
    pair: float = 0
    shift: float = 0
    shuffle: float = 0
    summed: float = 0
    encoded: float = 0
    decoded: float = 0
    collectives: float = 0


SENT = ("wire", "pair", "shift", "shuffle")  # the bytes on the link


def counted(algorithm: Algorithm, p: int, n: int, codec: Codec | None = None) -> Counts:
    """Adds up the rounds of an all-reduce on p devices with n elements each."""
    if algorithm not in ROUNDS:
        raise ValueError(
            f"`algorithm` must be one of {', '.join(ROUNDS)}, got {algorithm!r}."
        )
    n = check_elements("n", n)
    total: dict[str, float] = dict.fromkeys(Counts._fields, 0)
    for each in ROUNDS[algorithm](p, n, codec):
        total["messages"] += each.messages
        total["collectives"] += each.collectives
        total["wire"] += each.repeat * each.payload
        if each.pattern != "stream":
            total[each.pattern] += each.repeat * each.payload
        for work in (each.before, each.after):
            for name, size in work._asdict().items():
                total[name] += each.repeat * size
    return Counts(**total)


def encodings(algorithm: Algorithm, p: int, n: int, codec: Codec | None) -> int:
    """Returns how many times in turn a value is encoded, at most, on p devices."""
    rounds = ROUNDS[algorithm](p, n, codec)
    return sum(each.repeat for each in rounds if each.before.encoded)


COST_MODELS: dict[Algorithm, Callable[..., Counts]] = {
    name: functools.partial(counted, name) for name in ROUNDS
}
"""The closed form of each algorithm, by its name in `pj.collectives`.

A form takes the number p of devices, the number n of float32 elements on each device,
and a codec or `None`. It returns `Counts`.
"""


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
    whole = algorithm in ("psum", "tree", "parameter_server") and not levels
    added = algorithm != "psum" or codec.rounds > 0
    return added and (whole or not codec.needs_leaves)
