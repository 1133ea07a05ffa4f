"""Recursive halving and doubling: 2 log2(p) exchanges with partners, near and far.

1. halving: exchange half of what is left with a partner, add, keep a half: p/2 devices
   away, then p/4, ... until one piece is left
2. doubling: the same way back, with finished pieces

Where p is no power of two, q the largest below: the p - q last devices first give their
whole vectors to others, and are given the whole result.

Reference: Thakur, Rabenseifner and Gropp 2005, https://doi.org/10.1177/1094342005051521
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax.codecs import Codec, check_codec
from pipejax.mesh import AxisName, axis_size

from ._permute import among, hand_over, permute
from ._scatter_gather import ScatterGather
from ._sites import Cut, Parts, Site
from ._stages import Local, Stages, States, local


@dataclasses.dataclass(frozen=True)
class HalvingDoubling(ScatterGather):
    """See `halving_doubling`."""

    def pieces(self, devices: int) -> int:
        """The largest power of two."""
        return 1 << (devices.bit_length() - 1)

    def reduce_scatter(self, cut: Cut, axis_name: AxisName) -> Stages:
        """Folds the last devices in, then halves; of rank q and above, nothing."""
        total = self._fold(cut, axis_name)
        distance = cut.pieces // 2
        while distance:
            total += self._halve(cut, axis_name, distance)
            distance //= 2
        return total + local(lambda rows: jax.tree.map(lambda x: x[0], rows))

    def all_gather(self, cut: Cut, axis_name: AxisName) -> Stages:
        """Doubles, then gives the last devices the result."""
        site = cut.site("owner", self.codec, axis_name)

        def encode(piece: Parts, states: States) -> tuple[Any, States]:
            owns = lax.axis_index(axis_name) < cut.pieces
            payload, states = site.encode(piece, states, where=owns)
            return payload[None], states

        total = Stages((Local(encode, encodes=True),), (site.init,))
        distance = 1
        while distance < cut.pieces:
            total += _double(site, axis_name, distance, cut.pieces)
            distance *= 2
        return total + _unfold(site, axis_name, cut.pieces) + local(site.decode)

    def _fold(self, cut: Cut, axis_name: AxisName) -> Stages:
        q = cut.pieces
        pairs = [(rank, rank - q) for rank in range(q, axis_size(axis_name))]
        if not pairs:
            return Stages(())
        site = cut.site("fold", self.codec, axis_name, rows=q)

        def encode(rows: Parts, states: States) -> tuple[Any, States]:
            folds = lax.axis_index(axis_name) >= q
            payload, states = site.encode(rows, states, where=folds)
            return (rows, payload), states

        def add(value: Any) -> Parts:
            rows, payload = value
            given = among(axis_name, (to for _, to in pairs))
            sums = rows + site.decode(payload)
            return jax.tree.map(lambda s, r: jnp.where(given, s, r), sums, rows)

        sent = permute(axis_name, pairs, site.bytes)
        return Stages((Local(encode, encodes=True), sent), (site.init,)) + local(add)

    def _halve(self, cut: Cut, axis_name: AxisName, distance: int) -> Stages:
        """Of [2 d, h] to the sum of one half, [d, h]."""
        name = f"halve {distance}"
        site = cut.site(name, self.codec, axis_name, rows=distance)

        def encode(rows: Parts, states: States) -> tuple[Any, States]:
            rank = lax.axis_index(axis_name)
            upper = rank & distance  # 0, or where the upper half begins
            own = _part(rows, upper, distance)
            others = _part(rows, distance - upper, distance)
            payload, states = site.encode(others, states, where=rank < cut.pieces)
            return (own, payload), states

        def add(value: Any) -> Parts:
            own, payload = value
            return own + site.decode(payload)

        sent = permute(axis_name, _partners(distance, cut.pieces), site.bytes)
        return Stages((Local(encode, encodes=True), sent), (site.init,)) + local(add)


def _double(site: Site, axis_name: AxisName, distance: int, pieces: int) -> Stages:
    """Of payloads [d, ...] to [2 d, ...], in the order of their pieces."""

    def join(value: Any) -> jax.Array:
        own, other = value
        upper = lax.axis_index(axis_name) & distance > 0
        return jnp.concatenate(
            [jnp.where(upper, other, own), jnp.where(upper, own, other)]
        )

    sent = permute(axis_name, _partners(distance, pieces), distance * site.bytes)
    return local(lambda payload: (payload, payload)) + Stages((sent,)) + local(join)


def _unfold(site: Site, axis_name: AxisName, pieces: int) -> Stages:
    pairs = [(rank - pieces, rank) for rank in range(pieces, axis_size(axis_name))]
    if not pairs:
        return Stages(())
    return hand_over(axis_name, pairs, pieces * site.bytes)


def _partners(distance: int, pieces: int) -> list[tuple[int, int]]:
    return [(rank, rank ^ distance) for rank in range(pieces)]


def _part(rows: Parts, start: jax.Array, count: int) -> Parts:
    # Not a choice of two slices: in one program, XLA:CPU then computes both of every
    # level again for each element of the last.
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, count), rows)


def halving_doubling(codec: Codec | None = None) -> HalvingDoubling:
    """Exchanges with partners at distances p/2, p/4, ..., 1, and back.

    As little is sent as by a ring, in `2 log2(p)` exchanges instead of `2(p-1)` hops;
    partners are far apart. Where p is no power of two, two more of a whole vector.

    Args:
      codec: what travels in every exchange; `None` sends all bits.

    Raises:
      ValueError: for what is no codec.
    """
    return HalvingDoubling(check_codec(codec))
