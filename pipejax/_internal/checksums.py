r"""Checksums of arrays, whichever devices and processes hold their pieces.

Let `w_i` be the bits of element `i` of an array as a 32-bit integer, where `i` counts
in row-major order over the whole array. An element of 64 bits counts as two. With a
constant c and a bijective mixing function m, all modulo 2^32,

$$h_i = m(w_i + c \, i), \qquad s_1 = \sum_i h_i, \qquad s_2 = \sum_i (2 i + 1) h_i$$

The order of terms does not matter, so that each device adds up its own pieces. If one
element changes, `s_1` changes with certainty, because m is bijective. Any other damage
leaves both sums unchanged with a probability of about 2^-64.
"""

import collections
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils


def checksums(
    arrays: dict[str, jax.Array], *, every_copy: bool = False
) -> dict[str, str]:
    """Returns the checksum of each array as 16 hexadecimal digits, `s_1` before `s_2`.

    All processes must call this function with the same names and shapes. If each of
    them holds a whole copy of an array, its checksum is that of its own copy. Of an
    array that groups of devices hold, each split over its devices, it is that of the
    first copy. With `every_copy`, there are several if copies differ.
    """
    # All devices begin before the first result is fetched.
    copies = [_copies(x) if every_copy else 1 for x in arrays.values()]
    begun = [_own_sums(array, every_copy) for array in arrays.values()]
    most = max(copies, default=1)
    own = [_by_copy(sums, most) for sums in jax.device_get(begun)]
    if jax.process_count() > 1 and own:
        every = multihost_utils.process_allgather(np.stack(own))
        total = _total(every)
        whole = [array.is_fully_replicated for array in arrays.values()]
        own = [x if alone else y for x, y, alone in zip(own, total, whole, strict=True)]
    pairs = zip(own, copies, strict=True)
    texts = (_text(sums[:count]) for sums, count in pairs)
    return dict(zip(arrays, texts, strict=True))


def _text(sums: np.ndarray) -> str:
    """Returns the sums of all copies as text, and equal ones once."""
    return " and ".join(dict.fromkeys(f"{a:08x}{b:08x}" for a, b in sums))


def _copies(array: jax.Array) -> int:
    """Returns how many times groups of devices hold an array; 1 if each has all."""
    if array.is_fully_replicated:
        return 1
    indices = array.sharding.devices_indices_map(array.shape).values()
    return max(collections.Counter(map(str, indices)).values())


def _by_copy(sums: list[tuple[int, Any]], most: int) -> np.ndarray:
    """Adds up the sums of the pieces of each copy, which have the numbers of copies."""
    total = np.zeros((most, 2), np.uint32)
    for copy, each in sums:
        total[copy] += each
    return total


def sums(array: jax.Array) -> jax.Array:
    """Returns `[s_1, s_2]` over a whole array, as uint32; may be traced."""
    return _sums(array, _modulo([0] * array.ndim), _strides(array.shape))


def _own_sums(array: jax.Array, every_copy: bool) -> list[tuple[int, jax.Array]]:
    """Returns the sums of the pieces of this process, with the numbers of copies."""
    shards = array.addressable_shards
    if array.is_fully_replicated:
        pairs = [(0, shards[0])]
    else:
        # Each piece counts once, on whichever process holds its first copy.
        pairs = [(x.replica_id, x) for x in shards if every_copy or not x.replica_id]
    strides = _strides(array.shape)
    return [
        (copy, _sums(x.data, _modulo([i.start or 0 for i in x.index]), strides))
        for copy, x in pairs
    ]


def _total(sums: Any) -> np.ndarray:
    return np.asarray(np.sum(sums, axis=0, dtype=np.uint32))


def _strides(shape: tuple[int, ...]) -> np.ndarray:
    return _modulo([math.prod(shape[axis + 1 :]) for axis in range(len(shape))])


def _modulo(numbers: list[int]) -> np.ndarray:
    return np.array([number % 2**32 for number in numbers], np.uint32)


@jax.jit
def _sums(piece: jax.Array, starts: jax.Array, strides: jax.Array) -> jax.Array:
    words = _words(piece)
    index = jnp.zeros(piece.shape, jnp.uint32)
    for axis in range(piece.ndim):
        along = lax.broadcasted_iota(jnp.uint32, piece.shape, axis)
        index += (along + starts[axis]) * strides[axis]
    number = words.shape[-1]
    place = index[..., None] * jnp.uint32(number)
    place += lax.broadcasted_iota(jnp.uint32, words.shape, piece.ndim)
    mixed = _mixed(words + place * jnp.uint32(0x9E3779B9))
    weighted = mixed * (place * jnp.uint32(2) + jnp.uint32(1))
    # One pass over the array for both sums. On CPUs, XLA's sum of integers takes twenty
    # times as long as this reduction of pairs.
    zero = jnp.uint32(0)
    sums = lax.reduce((mixed, weighted), (zero, zero), _added, range(words.ndim))
    return jnp.stack(sums)


def _added(a: Any, b: Any) -> Any:
    return a[0] + b[0], a[1] + b[1]


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of each element as integers of 32 bits, along a last axis."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.concatenate([_words(lax.real(x)), _words(lax.imag(x))], axis=-1)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    bits = (jnp.finfo if floating else jnp.iinfo)(x.dtype).bits
    if bits == 64:
        return lax.bitcast_convert_type(x, jnp.uint32)
    word = jnp.dtype(f"uint{bits}")
    return lax.bitcast_convert_type(x, word).astype(jnp.uint32)[..., None]


def _mixed(x: jax.Array) -> jax.Array:
    """Returns a bijective function of an integer in which each bit changes many."""
    # The finalizer of MurmurHash3,
    # https://github.com/aappleby/smhasher/wiki/MurmurHash3. Each step can be undone: a
    # shift that leaves the upper bits, or an odd factor.
    x ^= x >> jnp.uint32(16)
    x *= jnp.uint32(0x85EBCA6B)
    x ^= x >> jnp.uint32(13)
    x *= jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
