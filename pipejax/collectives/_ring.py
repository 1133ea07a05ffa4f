"""Ring all-reduce: 2 (p-1) hops, each to the next device."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pipejax._internal.mesh import AxisName, axis_size
from pipejax.codecs import Codec, check_codec

from ._permute import Pairs, append_received, permute
from ._scatter_gather import ScatterGather
from ._sites import Cut, Parts, Site
from ._stages import Stages, local, on_first


@dataclasses.dataclass(frozen=True)
class Ring(ScatterGather):
    def reduce_scatter(self, cut: Cut, axis_name: AxisName) -> Stages:
        """Returns p-1 hops of partial sums, after which device i has piece i."""
        p = axis_size(axis_name)
        # Between hops, the value is `(payload, rows)`: the partial sum that this device
        # received, which is `None` before the first hop, and its own pieces.
        total = local(lambda rows: (None, rows))
        for hop in range(p - 1):
            site = cut.site(f"hop {hop}", self.codec, axis_name)
            sent = site.encoding + permute(axis_name, _to_next(p), site.bytes)
            total += _adding(site, axis_name, hop) + on_first(sent)
        last = cut.site("", self.codec, axis_name)
        return total + _adding(last, axis_name, p - 1) + local(lambda value: value[0])

    def all_gather(self, cut: Cut, axis_name: AxisName) -> Stages:
        """Returns p-1 hops of finished pieces: each device then has all pieces."""
        p = axis_size(axis_name)
        site = cut.site("owner", self.codec, axis_name)

        def read(payloads: list[jax.Array]) -> Parts:
            # Payload j is that of the device j ranks before; payload 0 is its own.
            ago = jnp.arange(p, dtype=jnp.int32)
            before = (lax.axis_index(axis_name) - ago) % p
            return site.decode(jnp.stack(payloads)[before])

        total = site.encoding + local(lambda payload: [payload])
        for _ in range(p - 1):
            # The payload that came last goes on to the next device.
            total += append_received(axis_name, _to_next(p), site.bytes, -1)
        return total + local(read)


def _to_next(p: int) -> Pairs:
    return [(i, (i + 1) % p) for i in range(p)]


def _adding(site: Site, axis_name: AxisName, hop: int) -> Stages:
    """Returns local work that adds this device's values to the received partial sum."""

    def add(value: tuple[jax.Array | None, Parts]) -> tuple[Parts, Parts]:
        payload, rows = value
        p = axis_size(axis_name)
        # Device i begins with piece i - 1. Each hop takes the partial sum of a piece
        # one rank further, so before hop h device i has that of piece i - h - 1. After
        # the last hop, h = p - 1, this is piece i.
        piece = (lax.axis_index(axis_name) - hop - 1) % p
        own = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, piece, 0, False), rows)
        return own if payload is None else own + site.decode(payload), rows

    return local(add)


def ring(codec: Codec | None = None) -> Ring:
    """Sends partial sums, and then sums, around a ring of devices.

    1. Reduce-scatter: in each of p-1 hops, a device sends a partial sum of one of p
       pieces to the next device, which adds its own values. At the end, device i has
       piece i.
    2. All-gather: in each of p-1 hops, a device sends a finished piece to the next
       device.

    Each device sends `2 (p-1)/p` payloads of a whole vector, the least that an
    all-reduce can send. With C the codec, every device ends with

    $$C(x_i + C(x_{i-1} + ... + C(x_{i+2} + C(x_{i+1}))))$$

    as piece i, where `x_j` is piece i of the vector of device j and indices are modulo
    p. As in the paper, every hop of the reduce-scatter encodes the partial sum again.
    The owner of a piece encodes it once, and the other devices pass on this payload.
    `two_shot` encodes each value only twice.

    Args:
      codec: Encodes the payloads of all hops; `None` encodes nothing.

    Returns:
      An `AllReduce` over any number of axes, which it treats as one.

    References:
      Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of
      Workstations, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002

      Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
    """
    return Ring(check_codec(codec))
