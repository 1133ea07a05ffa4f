"""Bits in unsigned integers: fewer than eight to an element, floats as they are."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Codes below `2^bits`, uint8 [..., m], to bytes [..., m bits / 8].

    Byte j holds elements `j, j + m', j + 2 m', ...` with `m' = m bits / 8`: runs of
    neighbours stay neighbours, which is what vector units want.
    """
    per_byte = 8 // bits
    planes = codes.reshape(*codes.shape[:-1], per_byte, -1)
    packed = planes[..., 0, :]
    for i in range(1, per_byte):
        packed = packed | (planes[..., i, :] << (i * bits))
    return packed


def unpack(packed: jax.Array, bits: int) -> jax.Array:
    """Inverse of `pack`."""
    if bits == 8:
        return packed
    planes = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return jnp.concatenate(planes, axis=-1)


def poison(x: jax.Array) -> jax.Array:
    """0, or NaN if one element is not finite: to be added to what is sent.

    Not by way of a maximum: of 4,096 elements or more XLA's loses NaN on CPUs,
    https://github.com/openxla/xla/issues/21461
    """
    return jnp.where(jnp.isfinite(x).all(), 0.0, jnp.nan).astype(x.dtype)


def to_words(x: jax.Array, word: Any = jnp.uint8) -> jax.Array:
    """The bits of an array, as a vector of unsigned integers."""
    return lax.bitcast_convert_type(x, word).reshape(-1)


def from_words(words: jax.Array, dtype: Any) -> jax.Array:
    """Inverse of `to_words`, of a vector."""
    ratio = jnp.dtype(dtype).itemsize // words.dtype.itemsize
    grouped = words.reshape(-1, ratio) if ratio > 1 else words
    return lax.bitcast_convert_type(grouped, dtype)
