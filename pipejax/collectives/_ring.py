"""Ring: 2 (p-1) hops, each to the next device. The algorithm of the Pipe-SGD paper.

1. Reduce-scatter: in each of p-1 hops, a device sends a partial sum of one piece to the
   next device, which adds its own values of this piece. At the end, device i has piece
   i of the sum.
2. All-gather: in each of p-1 hops, a device sends a finished piece to the next device.

With a codec, every hop of the reduce-scatter sends an encoded partial sum, as in the
paper. The next device decodes it, adds, and encodes again, so that the partial sum of a
piece is encoded p-1 times. In the all-gather, the owner of a piece encodes it once, and
the other devices pass on this payload without decoding it.

Reference: Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax._internal.mesh import AxisName, axis_size
from pipejax.codecs import Codec, check_codec

from ._permute import permute
from ._scatter_gather import ScatterGather
from ._sites import Cut, Parts, Site
from ._stages import Local, Sent, Stages, States, local


@dataclasses.dataclass(frozen=True)
class Ring(ScatterGather):
    """Ring all-reduce; see `ring`."""

    def reduce_scatter(self, cut: Cut, axis_name: AxisName) -> Stages:
        """Returns p-1 hops of partial sums, after which device i has piece i."""
        p = axis_size(axis_name)
        # Between hops, the value is `(rows, payload)`: the pieces of this device, and
        # the partial sum that it received, which is `None` before the first hop.
        total = local(lambda rows: (rows, None))
        for hop in range(p - 1):
            site = cut.site(f"hop {hop}", self.codec, axis_name)
            links = (Local(_encoding(site), encodes=True), _hop(site, axis_name))
            total += _adding(site, axis_name, hop) + Stages(links, (site.init,))
        last = cut.site("", self.codec, axis_name)
        return total + _adding(last, axis_name, p - 1) + local(lambda value: value[1])

    def all_gather(self, cut: Cut, axis_name: AxisName) -> Stages:
        """Returns p-1 hops of finished pieces: each device then has all pieces."""
        p = axis_size(axis_name)
        site = cut.site("owner", self.codec, axis_name)

        def encode(piece: Parts, states: States) -> tuple[Any, States]:
            payload, states = site.encode(piece, states)
            return ([], payload), states

        # Between hops, the value is `(seen, payload)`: the payloads before the last
        # one, and the last one that this device received.
        def keep(value: Any) -> Any:
            seen, payload = value
            return [*seen, payload], payload

        def read(value: Any) -> Parts:
            seen, payload = value
            # Payload j is that of the device j ranks before; payload 0 is its own.
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
    """Returns local work that adds this device's values to the received partial sum."""

    def add(value: Any) -> Any:
        rows, payload = value
        p = axis_size(axis_name)
        # Device i begins with piece i - 1. Each hop takes the partial sum of a piece
        # one rank further, so before hop h device i has that of piece i - h - 1. After
        # the last hop, h = p - 1, this is piece i.
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
    """Sends partial sums, and then sums, around a ring of devices.

    The vector is cut into p pieces, one for each device. Each device sends
    `2 (p-1)/p` payloads of a whole vector, which is the least that an all-reduce can
    send, in `2 (p-1)` hops. With C the codec, every device ends with

    $$C(x_i + C(x_{i-1} + ... + C(x_{i+2} + C(x_{i+1}))))$$

    as piece i, where `x_j` is piece i of the vector of device j and indices are modulo
    p. A value is thus encoded up to p times. `two_shot` sends as many bytes in 2
    collectives and encodes each value twice.

    Args:
      codec: Encodes the payloads of all hops. `None` sends all bits of float32 or
        float64 vectors.

    Returns:
      An `AllReduce` over any number of axes, which it treats as one.

    Raises:
      ValueError: If `codec` is neither a codec nor `None`.

    Warns:
      UserWarning: If `codec` is biased and has no error feedback.

    Examples:
      The number of collectives and the bytes that each of 8 devices sends for 1,000
      elements of float32. The axis of `jax.vmap` stands for the devices.

      >>> import jax
      >>> from pipejax.collectives import Layout, ring
      >>> def count():
      ...     transfers = ring()(Layout.of_shapes(((1000,),)), "data").transfers
      ...     print(len(transfers), sum(x.wire_bytes for x in transfers))
      >>> jax.vmap(count, axis_name="data", axis_size=8)()
      14 7000

    References:
      Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of
      Workstations, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002

      Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
    """
    return Ring(check_codec(codec))
