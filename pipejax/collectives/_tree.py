"""Binomial tree: vectors are reduced to device 0, which broadcasts the sum."""

import dataclasses

import jax
from jax import lax

from pipejax._internal.mesh import AxisName, axis_size
from pipejax.codecs import Codec, check_codec

from ._all_reduce import AllReduce
from ._layout import Layout
from ._permute import hand_over, send_and_add, twice
from ._sites import Cut, Parts, Site
from ._stages import Local, Stages, States, local


@dataclasses.dataclass(frozen=True)
class Tree(AllReduce):
    codec: Codec

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        p, codec = axis_size(axis_name), self.codec.of(layout.shapes)
        cut = Cut.of(layout, 1, codec.multiple)
        up = cut.site("up", codec, axis_name)
        down = cut.site("down", codec, axis_name)
        # The levels join the ranks (0, d), (2 d, 3 d), (4 d, 5 d), ... for each d.
        levels = [
            [(low, low + d) for low in range(0, p - d, 2 * d)]
            for d in [1 << i for i in range((p - 1).bit_length())]
        ]
        total = Stages((), (up.init,)) + local(lambda x: first(cut.rows(x)))
        for pairs in levels:
            # On the whole way up, a device sends at most once. One site with one state
            # for each device therefore serves all levels.
            level = send_and_add(up, axis_name, [(high, low) for low, high in pairs])
            total += twice() + Stages(level.links)
        total += from_root(down, axis_name)
        for pairs in reversed(levels):
            total += hand_over(axis_name, pairs, down.bytes)
        return total + local(lambda payload: cut.arrays(down.decode(payload[None])))


def first(rows: Parts) -> Parts:
    """Returns the first row, for a vector that is cut into one piece."""
    return jax.tree.map(lambda x: x[0], rows)


def from_root(site: Site, axis_name: AxisName) -> Stages:
    """Returns local work in which device 0 encodes the sum."""

    def encode(total: Parts, states: States) -> tuple[jax.Array, States]:
        # The other devices also compute a payload, which is not sent, and keep their
        # states.
        root = lax.axis_index(axis_name) == 0
        return site.encode(total, states, where=root)

    return Stages((Local(encode, encodes=True),), (site.init,))


def tree(codec: Codec | None = None) -> Tree:
    """Reduces vectors up a binomial tree, and broadcasts the sum down the tree.

    1. Up: devices 1, 3, 5, ... send their vectors to 0, 2, 4, ..., which add them to
       their own. Then devices 2, 6, 10, ... send to 0, 4, 8, ..., and so on.
    2. Down: the sum takes the same way back.

    With `s_l` the partial sum of a device before level l of the way up, `s'_l` that of
    the device that sends to it, and C the codec, the device computes

    $$s_{l+1} = s_l + C(s'_l)$$

    At the end, device 0 has a sum s, and sends `C(s)` to all devices. On p devices
    there are `2 ceil(log2 p)` collectives, in which the link of device 0 carries one
    payload of a whole vector each. Use `tree` for short vectors, whose cost is latency.

    Args:
      codec: Encodes the payloads at every level; `None` encodes nothing.

    Returns:
      An `AllReduce` over any number of axes, which it treats as one.

    References:
      Thakur et al., Optimization of Collective Communication Operations in MPICH, 2005,
      https://doi.org/10.1177/1094342005051521
    """
    return Tree(check_codec(codec))
