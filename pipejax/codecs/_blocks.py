"""Blocks of neighbours that share one float32 scale s, and travel in few bits each.

- `int8`, `int4`: `q = round(L x / s)`, s the largest magnitude, L = 127 or 7
- `fp8`: `q = fp8(L x / s)`, L its largest number: finer for the small ones of a block
- `sign`: `q = x < 0`, s the mean magnitude

A payload is bytes: all codes, then all scales. NaN and infinity come out as NaN: fp8
has one, of integers one is left over, -(L+1), and a mean is not finite if one element
is not. Scales alone do not tell: XLA's maximum of 4,096 elements or more loses NaN on
CPUs, https://github.com/openxla/xla/issues/21461
"""

import dataclasses
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pipejax.bits import from_words, pack, to_words, unpack
from pipejax.integers import is_integer

from ._codec import Codec
from ._rounding import Rounding, to_integer

# Scales below are as zero: their reciprocals would overflow, and gradients of this size
# move nothing.
SMALL = 2.0**-100


class Blocks(Codec):
    """What the four have in common: cut into blocks, scale, pack, and back."""

    block: int
    bits: int

    @property
    def multiple(self) -> int:
        """Whole blocks."""
        return self.block

    def size(self, n: int) -> int:
        """The codes, and 4 bytes a block."""
        return n * self.bits // 8 + 4 * (n // self.block)

    def scale(self, blocks: jax.Array) -> jax.Array:
        """[b, block] to [b, 1]."""
        return jnp.max(jnp.abs(blocks), axis=1, keepdims=True)

    def packed(self, codes: jax.Array, scale: jax.Array) -> jax.Array:
        """uint8 codes [b, block] below `2^bits`, and scales, as one payload."""
        return jnp.concatenate([pack(codes, self.bits).reshape(-1), to_words(scale)])

    def parted(self, payload: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
        """Inverse of `packed`."""
        coded = n * self.bits // 8
        packed = payload[:coded].reshape(n // self.block, -1)
        scale = from_words(payload[coded:], jnp.float32)
        return unpack(packed, self.bits), scale[:, None]

    def _blocks(self, x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32).reshape(-1, self.block)


@dataclasses.dataclass(frozen=True)
class Integers(Blocks, Rounding):
    """See `int8` and `int4`."""

    bits: int
    block: int

    @property
    def top(self) -> int:
        """L, the largest integer."""
        return 2 ** (self.bits - 1) - 1

    def rounded(self, x: jax.Array, noise: jax.Array | None) -> jax.Array:
        """Integers, as two's complement, and scales."""
        blocks = self._blocks(x)
        scale = self.scale(blocks)
        units = blocks * _over(self.top, scale)
        q = to_integer(units, noise, self.top)
        q = jnp.where(jnp.isnan(units), -self.top - 1, q)  # infinite: 0 x inf
        codes = lax.bitcast_convert_type(q.astype(jnp.int8), jnp.uint8)
        return self.packed(codes if self.bits == 8 else codes & 15, scale)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """`q s / L`, or NaN."""
        codes, scale = self.parted(payload, n)
        if self.bits < 8:
            codes = (codes ^ 8) - 8  # the sign bit of four, carried up
        q = lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)
        # In this order a scale of infinity reaches every element: 0 x inf is NaN.
        x = jnp.where(q < -self.top, jnp.nan, q * (scale / self.top))
        return x.reshape(-1)

    def bound(self, x: jax.Array) -> jax.Array:
        """Half the distance of two levels, `s / 2L`, and rounding of float32."""
        scale = self.scale(self._blocks(x))
        level = jnp.where(scale < SMALL, scale, scale * ((0.5 + 2e-5) / self.top))
        return jnp.broadcast_to(level, (level.size, self.block)).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Float8(Blocks):
    """See `fp8`."""

    dtype: str
    block: int
    bits: int = dataclasses.field(default=8, init=False)

    @property
    def top(self) -> float:
        """L, the largest finite number."""
        return float(jnp.finfo(self.dtype).max)

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Eight-bit floats, and scales."""
        blocks = self._blocks(x)
        scale = self.scale(blocks)
        small = (blocks * _over(self.top, scale)).astype(self.dtype)
        return self.packed(lax.bitcast_convert_type(small, jnp.uint8), scale), state

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """`q s / L`."""
        codes, scale = self.parted(payload, n)
        q = lax.bitcast_convert_type(codes, self.dtype).astype(jnp.float32)
        return (q * (scale / self.top)).reshape(-1)

    def bound(self, x: jax.Array) -> jax.Array:
        """Half a unit in the last place, or of the smallest numbers there are."""
        info = jnp.finfo(self.dtype)
        blocks = self._blocks(x)
        scale = self.scale(blocks)
        least = scale * (float(info.smallest_normal) / self.top)
        ulp = jnp.maximum(jnp.abs(blocks), least) * ((1 + 2e-5) * 2.0**-info.nmant / 2)
        return jnp.where(scale < SMALL, scale, ulp).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Sign(Blocks):
    """See `sign`."""

    block: int
    bits: int = dataclasses.field(default=1, init=False)

    @property
    def needs_feedback(self) -> bool:
        """Large and small elements come out alike."""
        return True

    def scale(self, blocks: jax.Array) -> jax.Array:
        """The mean magnitude, which does not overflow; blocks are powers of two."""
        return jnp.sum(jnp.abs(blocks) * (1 / self.block), axis=1, keepdims=True)

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Sign bits, eight to a byte, and scales."""
        blocks = self._blocks(x)
        return self.packed((blocks < 0).astype(jnp.uint8), self.scale(blocks)), state

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """`s` or `-s`."""
        codes, scale = self.parted(payload, n)
        return jnp.where(codes > 0, -scale, scale).reshape(-1)

    def bound(self, x: jax.Array) -> jax.Array:
        """`||x| - s|`, and rounding of float32."""
        blocks = self._blocks(x)
        scale = self.scale(blocks)
        magnitude = jnp.abs(blocks)
        slack = 2e-5 * jnp.maximum(magnitude, scale)
        return (jnp.abs(magnitude - scale) + slack).reshape(-1)


def int8(block: int = 256) -> Integers:
    """Eight-bit integers, one scale a block: `q = round(127 x / s)`, error `s / 254`.

    s is the largest magnitude of a block. On the wire `1 + 4/block` bytes an element.

    Args:
      block: elements that share a scale; a power of two, at least 8.

    Raises:
      ValueError: for another block.

    >>> codec = int8(block=8)
    >>> payload, _ = codec.encode(jnp.float32([1, 2, 3, 4, 5, 6, 7, 254]), ())
    >>> codec.decode(payload, 8)
    Array([  0.,   2.,   4.,   4.,   4.,   6.,   8., 254.], dtype=float32)
    """
    return Integers(8, check_block(block))


def int4(block: int = 64) -> Integers:
    """Four-bit integers, two to a byte: `q = round(7 x / s)`, error `s / 14`.

    As `int8` otherwise; `1/2 + 4/block` bytes an element.
    """
    return Integers(4, check_block(block))


def fp8(format: Literal["e4m3", "e5m2"] = "e4m3", block: int = 256) -> Float8:
    """Eight-bit floats, scaled so that a block's largest is the largest there is.

    Error at most `2^-4 |x|` (e4m3) or `2^-3 |x|` (e5m2), where `int8` has `s / 254`:
    finer for elements below a fifteenth of the block's largest, coarser above. On the
    wire `1 + 4/block` bytes an element.

    Args:
      format: e4m3 has 3 bits of mantissa and spans 2^-9 to 448, e5m2 2 and 2^-16 to
        57,344.
      block: elements that share a scale; a power of two, at least 8.

    Raises:
      ValueError: for another format or block.
    """
    dtypes = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
    if format not in dtypes:
        raise ValueError(
            f"`format` must be 'e4m3' or 'e5m2', the formats of eight bits; got"
            f" {format!r}."
        )
    return Float8(dtypes[format], check_block(block))


def sign(block: int = 1024) -> Sign:
    """One bit an element: `s sign(x)`, s the mean magnitude of the block.

    On the wire `1/8 + 4/block` bytes an element. Only with `error_feedback`.

    Args:
      block: elements that share a scale; a power of two, at least 8.

    Raises:
      ValueError: for another block.

    Reference: Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847
    """
    return Sign(check_block(block))


def check_block(block: int) -> int:
    """`block`, or a ValueError if it is no power of two of at least 8."""
    if not is_integer(block, 8) or block & (block - 1):
        raise ValueError(
            f"`block` must be a power of two of at least 8, got {block!r}. 64 to 1024"
            " are usual: smaller blocks err less and send more scales."
        )
    return operator.index(block)


def _over(top: float, scale: jax.Array) -> jax.Array:
    """`top / s` as a factor; 0 for a block of nothing."""
    return jnp.where(scale < SMALL, 0.0, top / jnp.maximum(scale, SMALL))
