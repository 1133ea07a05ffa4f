"""Binomial tree: reduced towards device 0, then broadcast from it.

1. up: devices 1, 3, 5, ... send to 0, 2, 4, ...; then 2, 6, ... to 0, 4, ...; and so on
2. down: the same way back

`2 ceil(log2 p)` exchanges, each of a whole vector: for short ones, which cost latency.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax.codecs import Codec, check_codec
from pipejax.mesh import AxisName, axis_size

from ._all_reduce import AllReduce
from ._layout import Layout
from ._permute import among, hand_over, permute
from ._sites import Cut, Parts, Site
from ._stages import Local, Stages, States, local


@dataclasses.dataclass(frozen=True)
class Tree(AllReduce):
    """See `tree`."""

    codec: Codec

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        """Up, then down."""
        codec = self.codec.of(layout.shapes)
        cut = Cut.of(layout, 1, codec.multiple)
        up = cut.site("up", codec, axis_name)
        down = cut.site("down", codec, axis_name)
        distances = [1 << i for i in range((axis_size(axis_name) - 1).bit_length())]
        total = Stages((), (up.init, down.init)) + local(lambda x: first(cut.rows(x)))
        for distance in distances:
            total += _up(up, axis_name, distance)
        total += from_root(down, axis_name)
        for distance in reversed(distances):
            pairs = _neighbours(axis_name, distance)
            total += hand_over(axis_name, pairs, down.bytes)
        return total + local(lambda payload: cut.arrays(down.decode(payload[None])))


def first(rows: Parts) -> Parts:
    """The only piece."""
    return jax.tree.map(lambda x: x[0], rows)


def from_root(site: Site, axis_name: AxisName) -> Stages:
    """The total, encoded by device 0; what others encode is not sent."""

    def encode(total: Parts, states: States) -> tuple[jax.Array, States]:
        root = lax.axis_index(axis_name) == 0
        return site.encode(total, states, where=root)

    return Stages((Local(encode, encodes=True),))


def _up(site: Site, axis_name: AxisName, distance: int) -> Stages:
    """Each device sends once in all, so that one site has one state for it."""
    pairs = [(high, low) for low, high in _neighbours(axis_name, distance)]

    def encode(own: Parts, states: States) -> tuple[Any, States]:
        sends = among(axis_name, (rank for rank, _ in pairs))
        payload, states = site.encode(own, states, where=sends)
        return (own, payload), states

    def add(value: Any) -> Parts:
        own, payload = value
        given = among(axis_name, (to for _, to in pairs))
        sums = own + site.decode(payload)
        return jax.tree.map(lambda s, o: jnp.where(given, s, o), sums, own)

    sent = permute(axis_name, pairs, site.bytes)
    return Stages((Local(encode, encodes=True), sent)) + local(add)


def _neighbours(axis_name: AxisName, distance: int) -> list[tuple[int, int]]:
    """Device 0 and the one at this distance, 2 of these further on the next two, ..."""
    high = range(distance, axis_size(axis_name), 2 * distance)
    return [(rank - distance, rank) for rank in high]


def tree(codec: Codec | None = None) -> Tree:
    """Reduced up a binomial tree, broadcast down.

    `2 ceil(log2 p)` exchanges of a whole payload. The root's link carries as many of
    them; a ring's every link carries less than two.

    Args:
      codec: what travels, up at every level, and down; `None` sends all bits.

    Raises:
      ValueError: for what is no codec.
    """
    return Tree(check_codec(codec))
