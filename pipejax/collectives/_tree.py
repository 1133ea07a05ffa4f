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

from pipejax.codecs import Codec
from pipejax.mesh import AxisName

from ._all_reduce import AllReduce, axis_size, check_codec
from ._sites import Cut, Parts, Site
from ._stages import Layout, Local, Sent, Stages, States, local
from ._wire import Transfer


@dataclasses.dataclass(frozen=True)
class Tree(AllReduce):
    """See `tree`."""

    codec: Codec

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        """Up, then down."""
        codec = whole(self.codec, layout)
        cut = Cut.of(layout, 1, codec.multiple)
        up = cut.site("up", codec, axis_name)
        down = cut.site("down", codec, axis_name)
        distances = [1 << i for i in range((axis_size(axis_name) - 1).bit_length())]
        total = Stages((), (up.init, down.init)) + local(lambda x: first(cut.rows(x)))
        for distance in distances:
            total += _up(up, axis_name, distance)
        total += from_root(down, axis_name)
        for distance in reversed(distances):
            total += _down(down, axis_name, distance)
        return total + local(lambda payload: cut.joined(down.decode(payload[None])))


def whole(codec: Codec, layout: Layout) -> Codec:
    """The codec for the vector's leaves, where it is not cut."""
    return codec if layout.shapes is None else codec.of(layout.shapes)


def first(rows: Parts) -> Parts:
    """The only piece."""
    return jax.tree.map(lambda x: x[0], rows)


def from_root(site: Site, axis_name: AxisName) -> Stages:
    """The total, encoded by device 0; what others encode is not sent."""

    def encode(total: Parts, states: States) -> tuple[jax.Array, States]:
        root = lax.axis_index(axis_name) == 0
        return site.encode(total, states, where=root)

    return Stages((Local(encode),))


def _up(site: Site, axis_name: AxisName, distance: int) -> Stages:
    """Each device sends once in all, so that one site has one state for it."""
    p = axis_size(axis_name)
    pairs = [(rank, rank - distance) for rank in range(distance, p, 2 * distance)]

    def encode(own: Parts, states: States) -> tuple[Any, States]:
        sends = lax.axis_index(axis_name) % (2 * distance) == distance
        payload, states = site.encode(own, states, where=sends)
        return (own, payload), states

    def send(value: Any) -> Any:
        own, payload = value
        return own, lax.ppermute(payload, axis_name, pairs)

    def add(value: Any, states: States) -> tuple[Parts, States]:
        own, payload = value
        rank = lax.axis_index(axis_name)
        given = (rank % (2 * distance) == 0) & (rank + distance < p)
        sums = own + site.decode(payload)
        return jax.tree.map(lambda s, o: jnp.where(given, s, o), sums, own), states

    transfer = Transfer("collective-permute", p, site.bytes)
    return Stages((Local(encode), Sent(send, transfer), Local(add)))


def _down(site: Site, axis_name: AxisName, distance: int) -> Stages:
    p = axis_size(axis_name)
    pairs = [(rank - distance, rank) for rank in range(distance, p, 2 * distance)]

    def send(payload: jax.Array) -> jax.Array:
        given = lax.axis_index(axis_name) % (2 * distance) == distance
        return jnp.where(given, lax.ppermute(payload, axis_name, pairs), payload)

    return Stages((Sent(send, Transfer("collective-permute", p, site.bytes)),))


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
