"""Coarse copies of arrays that other devices own, in 8 bits of logarithmic scale.

A code has a sign, six bits of exponent and one bit of mantissa. Exponents count down
from that of the largest magnitude in the array. A number thus has an error of at most a
fifth, over 63 powers of two; smaller numbers become 0.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pipejax.bits import to_words

TURNS = 8  # exchanges until all of an array is renewed
_CODES = 127  # of one sign, beside 0


def encoded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of a vector, and the exponent of its largest magnitude.

    Args:
      x: A vector of a floating dtype. NaN and infinity become the largest code.

    Returns:
      The codes, uint8 of the shape of `x`, and the exponent, int32 scalar.

    Examples:
      >>> codes, top = encoded(jnp.float32([1.0, -0.5, 0.0, 1.4]))
      >>> decoded(codes, top).tolist()
      [1.0, -0.5, 0.0, 1.5]
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    # The exponent and the first bit of the mantissa, rounded.
    steps = ((bits & 0x7FFFFFFF) + (1 << 21)) >> 22
    top = jnp.max(steps, initial=0)
    code = jnp.clip(steps - top + _CODES, 0, _CODES)
    code = jnp.where(steps == 0, 0, code)
    negative = jnp.where(bits < 0, 128, 0)
    return (code + negative).astype(jnp.uint8), top


def decoded(codes: jax.Array, top: jax.Array) -> jax.Array:
    """Undoes `encoded`.

    Args:
      codes: The codes, uint8.
      top: The exponent, int32, which broadcasts against `codes`.

    Returns:
      float32 numbers of the shape of `codes`.
    """
    code = (codes & 127).astype(jnp.int32)
    steps = jnp.clip(code + top - _CODES, 0, 510)
    bits = jnp.where(code == 0, 0, steps << 22)
    size = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(codes >= 128, -size, size)


class Coarse(NamedTuple):
    """Coarse copies of arrays that are split over devices, kept on every device.

    Each exchange renews one of `TURNS` slices of every piece, in turn.

    Attributes:
      codes: uint8 [p, TURNS, bytes], for each device and turn the codes of its slices
        of all arrays, followed by their exponents.
      turn: int32 scalar, the slice that is renewed next.
    """

    codes: Any
    turn: Any


class CoarseForm(NamedTuple):
    """The arrays of which devices keep coarse copies.

    Attributes:
      pieces: Shapes and dtypes of the pieces of one device.
      cuts: The axis along which each array is split over devices.
      devices: Number of devices p.
    """

    pieces: tuple[Any, ...]
    cuts: tuple[int, ...]
    devices: int

    @property
    def bytes(self) -> int:
        """Returns how many bytes a device sends in each exchange."""
        return sum(map(_length, self.pieces)) + 4 * len(self.pieces)

    def of(self, arrays: Sequence[jax.Array]) -> Coarse:
        """Returns coarse copies of whole arrays."""
        apart = [
            jnp.stack(jnp.split(x, self.devices, cut))
            for x, cut in zip(arrays, self.cuts, strict=True)
        ]
        turns = jnp.arange(TURNS)
        slices = jax.vmap(jax.vmap(self._slice, (None, 0)), (0, None))
        return Coarse(slices(apart, turns), jnp.int32(0))

    def slice(self, pieces: Sequence[jax.Array], coarse: Coarse) -> jax.Array:
        """Returns what this device sends of its pieces, a uint8 vector."""
        return self._slice(pieces, coarse.turn)

    def renewed(self, coarse: Coarse, sent: jax.Array) -> Coarse:
        """Returns the coarse copies after all devices have sent a slice.

        Args:
          coarse: The copies before.
          sent: What all devices sent, uint8 [p * bytes].
        """
        rows = sent.reshape(self.devices, -1)
        codes = lax.dynamic_update_index_in_dim(coarse.codes, rows, coarse.turn, 1)
        return Coarse(codes, (coarse.turn + 1) % TURNS)

    def arrays(self, coarse: Coarse) -> tuple[jax.Array, ...]:
        """Returns the whole arrays, as far as the coarse copies tell them."""
        found, start, codes = [], 0, coarse.codes
        tops = codes[..., sum(map(_length, self.pieces)) :]
        tops = lax.bitcast_convert_type(tops.reshape(*tops.shape[:2], -1, 4), jnp.int32)
        for i, (form, cut) in enumerate(zip(self.pieces, self.cuts, strict=True)):
            length = _length(form)
            rows = decoded(codes[..., start : start + length], tops[..., i, None])
            start += length
            flat = rows.reshape(self.devices, -1)[:, : math.prod(form.shape)]
            apart = flat.reshape(self.devices, *form.shape).astype(form.dtype)
            shape = [
                n * (self.devices if a == cut else 1) for a, n in enumerate(form.shape)
            ]
            found.append(jnp.moveaxis(apart, 0, cut).reshape(shape))
        return tuple(found)

    def _slice(self, pieces: Sequence[jax.Array], turn: jax.Array) -> jax.Array:
        """Returns codes and exponents of a slice of every piece of one device."""
        codes, tops = [], []
        for piece in pieces:
            length = -(-piece.size // TURNS)
            flat = jnp.pad(piece.reshape(-1), (0, TURNS * length - piece.size))
            part = lax.dynamic_slice_in_dim(flat, turn * length, length)
            code, top = encoded(part)
            codes.append(code)
            tops.append(to_words(top.reshape(1)))
        return jnp.concatenate([*codes, *tops])


def _length(form: Any) -> int:
    """Returns the number of elements of a slice of a piece."""
    return -(-math.prod(form.shape) // TURNS)
