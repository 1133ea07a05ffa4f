"""Conversions between arrays and unsigned integers that hold their bits.

Codecs use these functions to make payloads: `pack` and `unpack` for codes of fewer than
eight bits, and `to_words` and `from_words` for floats.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs codes of 1, 2, 4 or 8 bits, uint8 `[..., m]`, into bytes."""
    per_byte = 8 // bits
    # Byte j holds the codes j, j + m', j + 2 m', ..., the first of them in the lowest
    # bits, where m' is the number of bytes in a row. Neighboring codes go into
    # neighboring bytes, which suits vector units.
    planes = codes.reshape(*codes.shape[:-1], per_byte, -1)
    packed = planes[..., 0, :]
    for i in range(1, per_byte):
        packed = packed | (planes[..., i, :] << (i * bits))
    return packed


def unpack(packed: jax.Array, bits: int) -> jax.Array:
    """Undoes `pack`."""
    if bits == 8:
        return packed
    planes = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return jnp.concatenate(planes, axis=-1)


def poison(x: jax.Array) -> jax.Array:
    """Returns 0 if all elements are finite, and NaN otherwise.

    A codec adds it to its payload, so that a bad element makes the decoded vector NaN
    even if the element is not sent.
    """
    # No maximum is used: on CPUs, XLA's maximum of 4,096 or more elements loses NaN,
    # https://github.com/openxla/xla/issues/21461
    return jnp.where(jnp.isfinite(x).all(), 0.0, jnp.nan).astype(x.dtype)


def to_words(x: jax.Array, word: Any = jnp.uint8) -> jax.Array:
    """Returns the bits of an array as a vector of unsigned integers."""
    return lax.bitcast_convert_type(x, word).reshape(-1)


def from_words(words: jax.Array, dtype: Any) -> jax.Array:
    """Undoes `to_words` for an array that was a vector."""
    # JAX joins words along a last axis of exactly this length.
    ratio = jnp.dtype(dtype).itemsize // words.dtype.itemsize
    grouped = words.reshape(-1, ratio) if ratio > 1 else words
    return lax.bitcast_convert_type(grouped, dtype)
