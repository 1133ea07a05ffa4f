"""Ring: 2(p-1) hops, each to the next device; the paper's algorithm.

1. in each of p-1 hops a device adds its own piece to the partial sum that it was given,
   and passes it on; at the end device i has the sum of piece i
2. in each of p-1 more it passes on a finished piece

Under a codec every hop of the first half decodes, adds and encodes, as in the paper:
p-1 errors of partial sums. The second half passes on what the owner encoded, unread.

Reference: Li et al., Pipe-SGD, 2018, https://arxiv.org/abs/1811.03619
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax.codecs import Codec, check_codec
from pipejax.mesh import AxisName, axis_size

from ._permute import permute
from ._scatter_gather import ScatterGather
from ._sites import Cut, Parts, Site
from ._stages import Local, Sent, Stages, States, local


@dataclasses.dataclass(frozen=True)
class Ring(ScatterGather):
    """See `ring`."""

    def reduce_scatter(self, cut: Cut, axis_name: AxisName) -> Stages:
        """p-1 hops of partial sums; the value is `(rows, payload)`."""
        p = axis_size(axis_name)
        total = local(lambda rows: (rows, None))
        for hop in range(p - 1):
            site = cut.site(f"hop {hop}", self.codec, axis_name)
            links = (Local(_encoding(site), encodes=True), _hop(site, axis_name))
            total += _adding(site, axis_name, hop) + Stages(links, (site.init,))
        last = cut.site("", self.codec, axis_name)
        return total + _adding(last, axis_name, p - 1) + local(lambda value: value[1])

    def all_gather(self, cut: Cut, axis_name: AxisName) -> Stages:
        """p-1 hops of finished pieces; the value is all payloads so far."""
        p = axis_size(axis_name)
        site = cut.site("owner", self.codec, axis_name)

        def encode(piece: Parts, states: States) -> tuple[Any, States]:
            payload, states = site.encode(piece, states)
            return ([], payload), states

        def keep(value: Any) -> Any:
            seen, payload = value
            return [*seen, payload], payload

        def read(value: Any) -> Parts:
            seen, payload = value
            # The j-th that came is the piece of the j-th device before this one.
            ago = jnp.arange(p, dtype=jnp.int32)
            before = (lax.axis_index(axis_name) - ago) % p
            return site.decode(jnp.stack([*seen, payload])[before])

        hop = local(keep) + Stages((_hop(site, axis_name),))
        hops = sum((hop for _ in range(p - 1)), Stages(()))
        return Stages((Local(encode, encodes=True),), (site.init,)) + hops + local(read)


def _hop(site: Site, axis_name: AxisName) -> Sent:
    p = axis_size(axis_name)
    to_next = [(i, (i + 1) % p) for i in range(p)]
    return permute(axis_name, to_next, site.bytes)


def _adding(site: Site, axis_name: AxisName, hop: int) -> Stages:
    """Of what has come so far, and this device's own of the same piece, the sum.

    Before hop h device i holds piece i - h - 1: at the end, after p - 1 hops, piece i.
    """

    def add(value: Any) -> Any:
        rows, payload = value
        p = axis_size(axis_name)
        piece = (lax.axis_index(axis_name) - hop - 1) % p
        own = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, piece, 0, False), rows)
        return rows, own if payload is None else own + site.decode(payload)

    return local(add)


def _encoding(site: Site) -> Any:
    def encode(value: Any, states: States) -> tuple[Any, States]:
        rows, partial = value
        payload, states = site.encode(partial, states)
        return (rows, payload), states

    return encode


def ring(codec: Codec | None = None) -> Ring:
    """Partial sums and then sums go round, a p-th of the vector at a time.

    Each device sends `2 (p-1)/p` payloads of a whole vector, in `2(p-1)` hops, which is
    as little as an all-reduce can. With C the codec, a piece is
    `C(x_i + C(x_j + C(... C(x_k))))`.

    Args:
      codec: what travels on every hop; `None` sends all bits.

    Raises:
      ValueError: for what is no codec.
    """
    return Ring(check_codec(codec))
