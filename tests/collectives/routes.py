"""Reads from lowered programs which device sends what, and counts encodings."""

import dataclasses
import json
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._internal.mesh import on_mesh
from pipejax.codecs import Codec
from pipejax.collectives import Layout

from .cases import summed

_SENT = re.compile(
    r'"stablehlo\.(collective_permute|all_to_all|all_gather)".*'
    r"(?:source_target_pairs|replica_groups) = (dense<.*?>|#.*?\]>).*"
    r": \(tensor<((?:\d+x)+)[a-z]+(\d+)>\) ->"
)


class Sent(NamedTuple):
    """
    One collective of a lowered program.

    Attributes:
      kind: The name of the collective.
      among: The pairs (from, to) of a permute, or the groups of devices of any other.
      bytes: The size of the array that each device contributes.
    """

    kind: str
    among: list[list[int]]
    bytes: int


def sent(all_reduce, devices, n, hosts=None):
    """Lowers the sum of n float32 numbers, and returns its collectives in order."""
    rows = jax.ShapeDtypeStruct((devices, n), "float32")
    found = _SENT.findall(_program(all_reduce, devices, n, hosts).lower(rows).as_text())
    return [
        Sent(
            kind.replace("_", "-"),
            _among(among, devices, hosts),
            math.prod(map(int, sizes[:-1].split("x"))) * int(bits) // 8,
        )
        for kind, among, sizes, bits in found
    ]


def _among(text, devices, hosts):
    """Reads pairs or groups. JAX 0.12 writes the name of a mesh axis in their place."""
    if text.startswith("dense"):
        return json.loads(text.removeprefix("dense<").removesuffix(">"))
    (axis,) = re.findall(r'axis_ref<name = "(\w+)">', text)
    by_host = np.arange(devices).reshape(hosts or 1, -1)
    return (by_host.T if axis == "host" else by_host).tolist()


def sums(all_reduce, rows, hosts=None):
    """Sums rows [p, n], one on each device, and returns the result of each device."""
    rows = np.asarray(rows, np.float32)
    return np.asarray(_program(all_reduce, *rows.shape, hosts)(rows))


def _program(all_reduce, devices, n, hosts):
    axis = "data" if hosts is None else ("host", "device")
    layout = Layout.of_shapes(((n,),))
    own = P(axis)

    def local(row):
        return summed(layout, all_reduce(layout, axis), row[0])[0][None]

    mesh = pj.data_mesh(devices, axis_name=axis, hosts=hosts)
    return jax.jit(on_mesh(local, mesh, own, own))


@dataclasses.dataclass(frozen=True)
class Halving(Codec):
    """Decodes to half of what was encoded, so that a sum counts the encodings."""

    def size(self, n):
        return 4 * n

    def encode(self, x, state):
        return lax.bitcast_convert_type(x, jnp.uint32), state

    def decode(self, payload, n):
        return lax.bitcast_convert_type(payload, jnp.float32) / 2


def encodings(all_reduce, devices, pieces, hosts=None):
    """
    Counts how often device i's numbers were encoded in the sum of piece j.

    Device i has a 1 at the i-th place of each piece and zeros elsewhere. Each time that
    `Halving` encodes the 1, it is halved.

    Returns:
      A list for each piece, with a number for each device.
    """
    rows = np.tile(np.eye(devices, dtype=np.float32), (1, pieces))
    found = sums(all_reduce, rows, hosts)
    np.testing.assert_array_equal(found, np.tile(found[0], (devices, 1)))
    return (-np.log2(found[0])).reshape(pieces, devices).tolist()
