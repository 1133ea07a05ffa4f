"""Recursive halving and doubling: 2 log2(p) collectives between pairs of devices."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pipejax._internal.mesh import AxisName, axis_size
from pipejax.codecs import Codec, check_codec

from ._permute import Pairs, hand_over, permute, send_and_add, twice
from ._scatter_gather import ScatterGather
from ._sites import Cut, Parts, Site
from ._stages import Local, Stages, States, local, on_first


@dataclasses.dataclass(frozen=True)
class HalvingDoubling(ScatterGather):
    def pieces(self, devices: int) -> int:
        """Returns the largest power of two that is at most `devices`."""
        return 1 << (devices.bit_length() - 1)

    def reduce_scatter(self, cut: Cut, axis_name: AxisName) -> Stages:
        """Returns the stages of the halving, after which device i has piece i."""
        # Each device has q rows. A halving at distance d turns 2 d rows into d rows of
        # sums, so the first distance is q / 2, and one row is left at the end.
        total = self._fold(cut, axis_name)
        distance = cut.pieces // 2
        while distance:
            total += self._halve(cut, axis_name, distance)
            distance //= 2
        # The last p - q devices have run the same program. Their row is not used.
        return total + local(lambda rows: jax.tree.map(lambda x: x[0], rows))

    def all_gather(self, cut: Cut, axis_name: AxisName) -> Stages:
        """Returns the stages of the doubling: each device then has all pieces."""
        site = cut.site("owner", self.codec, axis_name)

        def encode(piece: Parts, states: States) -> tuple[jax.Array, States]:
            # Others encode too, because all devices run one program. Their states must
            # not change.
            owns = lax.axis_index(axis_name) < cut.pieces
            payload, states = site.encode(piece, states, where=owns)
            # The one row is doubled log2(q) times, to the q payloads of all pieces.
            return payload[None], states

        total = Stages((Local(encode, encodes=True),), (site.init,))
        distance = 1
        while distance < cut.pieces:
            total += _double(site, axis_name, distance, cut.pieces)
            distance *= 2
        return total + _unfold(site, axis_name, cut.pieces) + local(site.decode)

    def _fold(self, cut: Cut, axis_name: AxisName) -> Stages:
        """Returns the stage in which the last p - q devices send their vectors."""
        q = cut.pieces
        pairs = [(rank, rank - q) for rank in range(q, axis_size(axis_name))]
        if not pairs:
            return Stages(())
        site = cut.site("fold", self.codec, axis_name, rows=q)
        return twice() + send_and_add(site, axis_name, pairs)

    def _halve(self, cut: Cut, axis_name: AxisName, distance: int) -> Stages:
        """Returns one halving: from 2 d rows to d rows of sums, with d = `distance`."""
        name = f"halve {distance}"
        site = cut.site(name, self.codec, axis_name, rows=distance)

        def split(rows: Parts) -> tuple[Parts, Parts]:
            # The first row that this device keeps: 0, or `distance` in the upper half.
            # The partner keeps the other half: its rank differs in the one bit
            # `distance`.
            upper = lax.axis_index(axis_name) & distance
            return _rows(rows, distance - upper, distance), _rows(rows, upper, distance)

        pairs = _partners(distance, cut.pieces)
        return local(split) + send_and_add(site, axis_name, pairs)


def _double(site: Site, axis_name: AxisName, distance: int, pieces: int) -> Stages:
    """Returns one doubling: from d = `distance` payloads to 2 d, in order of piece."""

    def join(value: tuple[jax.Array, jax.Array]) -> jax.Array:
        other, own = value
        # The device with the bit has the later pieces, so its payloads come second.
        # Both devices of a pair end with the same rows in the same order.
        upper = lax.axis_index(axis_name) & distance > 0
        return jnp.concatenate(
            [jnp.where(upper, other, own), jnp.where(upper, own, other)]
        )

    pairs = _partners(distance, pieces)
    sent = permute(axis_name, pairs, distance * site.bytes)
    return twice() + on_first(sent) + local(join)


def _unfold(site: Site, axis_name: AxisName, pieces: int) -> Stages:
    """Returns the stage in which the last p - q devices receive all payloads."""
    # The way back of `_fold`. Payloads are handed on as they are, so that the last
    # devices decode the same bits as all others.
    pairs = [(rank - pieces, rank) for rank in range(pieces, axis_size(axis_name))]
    if not pairs:
        return Stages(())
    return hand_over(axis_name, pairs, pieces * site.bytes)


def _partners(distance: int, pieces: int) -> Pairs:
    return [(rank, rank ^ distance) for rank in range(pieces)]


def _rows(rows: Parts, start: jax.Array, count: int) -> Parts:
    # A dynamic slice, since a `jnp.where` of two static slices is slow: in one program,
    # XLA:CPU then recomputes both slices of every level for each element of the last.
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, count), rows)


def halving_doubling(codec: Codec | None = None) -> HalvingDoubling:
    """Sums between pairs of devices at distances p/2, p/4, ..., 1, and back.

    1. Halving: each device and its partner, p/2 ranks away, send each other one half of
       their vectors, and add what they receive to the half that they kept. They repeat
       this with the remaining half and partners p/4, p/8, ..., 1 ranks away. At the
       end, each device has one piece of the sum.
    2. Doubling: the devices send finished pieces to the same partners in reverse order.
       At the end, every device has all pieces.

    For any other p, let q be the largest power of two below p. The last p - q devices
    first send their whole vectors to the first p - q devices, and receive the whole
    result at the end, in two more collectives.

    Let `s_l` be the partial sum of a device before halving l, of the pieces that it
    keeps, `s'_l` its partner's partial sum of the same pieces, and C the codec. The
    device computes

    $$s_{l+1} = s_l + C(s'_l)$$

    At the end, the owner of a piece has its sum s, and sends `C(s)` to all devices.
    Each device sends as few bytes as in `ring`, in `2 log2(p)` collectives. Partners
    are up to p/2 ranks apart, while `ring` uses only the links between neighbours.

    Args:
      codec: Encodes the payloads of all collectives; `None` encodes nothing.

    Returns:
      An `AllReduce` over any number of axes, which it treats as one.

    References:
      Thakur et al., Optimization of Collective Communication Operations in MPICH, 2005,
      https://doi.org/10.1177/1094342005051521
    """
    return HalvingDoubling(check_codec(codec))
