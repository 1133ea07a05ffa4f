"""
Implements every all-reduce by loops over a list of blocks, one vector a device.

`send(place, device, block, row)` returns `decode(encode(block))`: the values that
arrive when a device encodes a block at this place of the algorithm, with the row-th of
several states. Sums are taken in rank order in the blocks' dtype, float32 or float64.
"""

import functools
import operator
from typing import Any

import jax
import numpy as np

# LLVM's optimizations and YNNPACK's kernels contract a multiplication and an addition
# in one loop into one operation that rounds once less. Without both, the bits depend
# only on the algorithm, not on what XLA puts into one loop.
EXACT_BITS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_experimental_ynn_fusion_type": "",
}


def psum_ref(blocks, send):
    if not hasattr(send, "codec"):
        return [added(blocks)] * len(blocks)
    # A linear codec sums, round by round, what each device projects.
    sums = ()
    for _ in range(send.codec.rounds):
        parts = [send.project(i, block, sums) for i, block in enumerate(blocks)]
        sums = (*sums, added(parts))
    totals = [send.rebuild(i, sums, len(block)) for i, block in enumerate(blocks)]
    for i, block in enumerate(blocks):
        send.settle(i, block, sums, parts[i])
    return totals


def parameter_server_ref(blocks, send):
    total = added([send("worker", i, block) for i, block in enumerate(blocks)])
    return [send("server", 0, total)] * len(blocks)


def tree_ref(blocks, send):
    totals, distance = list(blocks), 1
    while distance < len(blocks):
        for i in range(0, len(blocks) - distance, 2 * distance):
            totals[i] = totals[i] + send("up", i + distance, totals[i + distance])
        distance *= 2
    return [send("down", 0, totals[0])] * len(blocks)


def two_shot_scatter(rows, send):
    """Returns on device j the sum of piece j of all rows, as they arrive there."""
    p = range(len(rows))
    return [added([send("scatter", i, rows[i][j], j) for i in p]) for j in p]


def ring_scatter(rows, send):
    """Sends piece j from device j + 1 around the ring to device j, adding rows."""
    p, sums = len(rows), []
    for j in range(p):
        partial = rows[(j + 1) % p][j]
        for hop in range(p - 1):
            here = (j + 1 + hop) % p
            arrived = send(f"hop {hop}", here, partial)
            partial = rows[(here + 1) % p][j] + arrived
        sums.append(partial)
    return sums


def halving_scatter(rows, send):
    """Folds devices beyond a power of two into the first, then halves the rows."""
    q = len(rows[0])
    held = [list(row) for row in rows[:q]]
    for i in range(q, len(rows)):
        given = [send("fold", i, piece, k) for k, piece in enumerate(rows[i])]
        held[i - q] = [a + b for a, b in zip(held[i - q], given, strict=True)]
    distance = q // 2
    while distance:

        def half(device, keeper, held=held, distance=distance):
            upper = keeper & distance
            return held[device][distance:] if upper else held[device][:distance]

        def given(i, half=half, distance=distance):
            partner, place = i ^ distance, f"halve {distance}"
            return [send(place, partner, x, k) for k, x in enumerate(half(partner, i))]

        pairs = [zip(half(i, i), given(i), strict=True) for i in range(q)]
        held = [[a + b for a, b in pair] for pair in pairs]
        distance //= 2
    return [pieces[0] for pieces in held]


def scatter_gather_ref(blocks, send, scatter, owner, pieces=None):
    """Sums pieces by `scatter`. Each owner encodes its sum, and all decode it."""
    pieces = pieces or len(blocks)
    sums = scatter([cut(block, pieces, send.multiple) for block in blocks], send)
    rows = [send(owner, j, total) for j, total in enumerate(sums)]
    return [np.concatenate(rows)[: len(block)] for block in blocks]


def two_shot_ref(blocks, send):
    return scatter_gather_ref(blocks, send, two_shot_scatter, "gather")


def ring_ref(blocks, send):
    return scatter_gather_ref(blocks, send, ring_scatter, "owner")


def halving_doubling_ref(blocks, send):
    q = 1 << len(blocks).bit_length() - 1
    return scatter_gather_ref(blocks, send, halving_scatter, "owner", q)


def hierarchical_ref(blocks, send, hosts, outer=two_shot_ref):
    """Sums exactly inside each host, piece by piece, and by `outer` between hosts."""
    d, n = len(blocks) // hosts, len(blocks[0])
    rows = [cut(block, d, 1) for block in blocks]
    pieces = []
    for j in range(d):
        inside = [added([rows[h * d + i][j] for i in range(d)]) for h in range(hosts)]
        pieces.append(outer(inside, send.among("outer ", range(j, hosts * d, d)))[0])
    return [np.concatenate(pieces)[:n]] * len(blocks)


def cut(block, pieces, multiple):
    """Cuts a block into equal pieces of a multiple of `multiple`, padded with zeros."""
    length = multiple * max(1, -(-len(block) // (pieces * multiple)))
    return np.pad(block, (0, pieces * length - len(block))).reshape(pieces, length)


def added(blocks):
    return functools.reduce(operator.add, blocks)


class Exactly:
    """Sends blocks unchanged."""

    multiple = 1

    def __call__(self, place, device, block, row=None):
        return block

    def among(self, prefix, devices):
        return self


class Coded:
    """Sends blocks encoded and decoded, and updates `states[device][place]`."""

    def __init__(self, codec, states, prefix="", devices=None):
        self.codec, self.states, self.prefix = codec, states, prefix
        self.devices = range(len(states)) if devices is None else devices
        self.multiple = codec.multiple

    def among(self, prefix, devices):
        return Coded(self.codec, self.states, prefix, devices)

    def __call__(self, place, device, block, row=None):
        states, place = self.states[self.devices[device]], self.prefix + place
        # A codec without a state has no entry. A codec with a state has a row for each
        # block.
        whole = states.get(place, ())
        one = whole if row is None else jax.tree.map(lambda x: x[row], whole)
        encode, decode = compiled(self.codec)
        n = -(-len(block) // self.multiple) * self.multiple
        payload, new = encode(np.pad(block, (0, n - len(block))), one)
        if jax.tree.leaves(new):
            states[place] = new if row is None else put(whole, row, new)
        return np.asarray(decode(payload, n))[: len(block)].astype(block.dtype)

    def project(self, device, block, sums):
        leaves = self.codec.leaves(block)
        return np.asarray(self._linear("project")(leaves, self._own(device), sums))

    def rebuild(self, device, sums, n):
        rebuild = self._linear("rebuild", static_argnums=2)
        leaves = jax.tree.leaves(rebuild(self._own(device), sums, n))
        return np.concatenate([np.ravel(leaf) for leaf in leaves])

    def settle(self, device, block, sums, own):
        leaves = self.codec.leaves(block)
        settled = self._linear("settled")(leaves, self._own(device), sums, own)
        self.states[self.devices[device]][self.prefix + "psum"] = settled

    def _own(self, device):
        return self.states[self.devices[device]][self.prefix + "psum"]

    def _linear(self, name, **options):
        return jitted(getattr(self.codec, name), **options)


def put(whole, row, new):
    def one(old, x):
        out = np.array(old)
        out[row] = x
        return out

    return jax.tree.map(one, whole, new)


@functools.cache
def jitted(function, **options):
    return jax.jit(function, compiler_options=EXACT_BITS, **options)


@functools.cache
def compiled(codec):
    return jitted(codec.encode), jitted(codec.decode, static_argnums=1)
