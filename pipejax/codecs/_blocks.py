"""Codecs that send few bits per element and one float32 scale per block of elements.

The payload is a vector of bytes: the codes of all blocks, followed by all scales. `L`
is the largest code, and `s` the scale of a block.

NaN and infinity decode to NaN. For `fp8`, NaN is a number of the format. For `int8`,
`int4` and `fp4`, the unused integer `-(L + 1)` stands for NaN. For `sign` and `int2`,
the scale is NaN or infinite, because the mean is not finite if an element is not. For
the other codecs the scale alone would not be enough: on CPUs, XLA's maximum of 4,096 or
more elements loses NaN, https://github.com/openxla/xla/issues/21461
"""

import dataclasses
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pipejax._internal.bits import from_words, pack, to_words, unpack
from pipejax._internal.integers import is_integer

from ._codec import Codec
from ._rounding import Rounding, to_integer

# A block whose scale is smaller than this decodes to zeros. `L / scale` could overflow,
# and gradients of this size do not change the parameters.
SMALL = 2.0**-100


class Blocks(Codec):
    block: int
    bits: int

    @property
    def multiple(self) -> int:
        return self.block

    def size(self, n: int) -> int:
        return n * self.bits // 8 + 4 * (n // self.block)

    def scale(self, blocks: jax.Array) -> jax.Array:
        """Returns the largest magnitude in each block: `[b, block]` to `[b, 1]`."""
        return jnp.max(jnp.abs(blocks), axis=1, keepdims=True)

    def packed(self, codes: jax.Array, scale: jax.Array) -> jax.Array:
        """Packs codes, uint8 `[b, block]`, and scales `[b, 1]` into one payload."""
        return jnp.concatenate([pack(codes, self.bits).reshape(-1), to_words(scale)])

    def parted(self, payload: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
        """Undoes `packed` for the payload of `n` elements."""
        coded = n * self.bits // 8
        packed = payload[:coded].reshape(n // self.block, -1)
        scale = from_words(payload[coded:], jnp.float32)
        return unpack(packed, self.bits), scale[:, None]

    def _blocks(self, x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32).reshape(-1, self.block)


@dataclasses.dataclass(frozen=True)
class Integers(Blocks, Rounding):
    """Codec with integer codes; see `int8` and `int4`."""

    bits: int
    block: int

    @property
    def top(self) -> int:
        return 2 ** (self.bits - 1) - 1

    @property
    def peak(self) -> float:
        """Returns the number that the largest magnitude of a block is scaled to."""
        return self.top

    def places(self, units: jax.Array) -> jax.Array:
        """Returns where numbers lie among the levels, whose places are the integers."""
        return units

    def numbers(self, codes: jax.Array) -> jax.Array:
        """Returns the numbers at the given places, which are integers."""
        return codes

    def rounded(self, x: jax.Array, noise: jax.Array | None) -> jax.Array:
        blocks = self._blocks(x)
        scale = self.scale(blocks)
        # This is one division a block, in place of one an element.
        units = blocks * _over(self.peak, scale)
        q = to_integer(self.places(units), noise, self.top)
        # `units` is NaN for an infinite element too. Its scale is infinite, so that
        # `top / scale` is 0, and infinity times 0 is NaN.
        q = jnp.where(jnp.isnan(units), -self.top - 1, q)
        codes = lax.bitcast_convert_type(q.astype(jnp.int8), jnp.uint8)
        # The lower four bits of a byte are the same integer in four bits.
        return self.packed(codes if self.bits == 8 else codes & 15, scale)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        codes, scale = self.parted(payload, n)
        if self.bits < 8:
            codes = (codes ^ 8) - 8  # extends the sign bit of the four-bit integer
        q = lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)
        # An infinite scale makes every element of the block NaN, because zero times
        # infinity is NaN. The scale is divided first because `q * scale` may overflow.
        numbers = self.numbers(q) * (scale / self.peak)
        return jnp.where(q < -self.top, jnp.nan, numbers).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Float4(Integers):
    """Codec with four-bit floats, whose codes number them in order; see `fp4`."""

    bits: int = dataclasses.field(default=4, init=False)

    @property
    def peak(self) -> float:
        return 6.0

    # From 0 to 2, the floats are 1/2 apart, then 1 up to 4, and 2 up to 6. Between two
    # of them, their number is a linear function. Rounding this function to an integer
    # is therefore rounding to one of the floats, and as unbiased. An even integer is an
    # even mantissa.
    def places(self, units: jax.Array) -> jax.Array:
        y = jnp.abs(units)
        place = jnp.where(y < 2, 2 * y, jnp.where(y < 4, y + 2, y / 2 + 4))
        return jnp.copysign(place, units)

    def numbers(self, codes: jax.Array) -> jax.Array:
        q = jnp.abs(codes)
        y = jnp.where(q < 4, q / 2, jnp.where(q < 6, q - 2, 2 * q - 8))
        return jnp.copysign(y, codes)


@dataclasses.dataclass(frozen=True)
class Float8(Blocks):
    """Codec with eight-bit floats as codes; see `fp8`."""

    dtype: str
    block: int
    bits: int = dataclasses.field(default=8, init=False)

    @property
    def top(self) -> float:
        return float(jnp.finfo(self.dtype).max)

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        blocks = self._blocks(x)
        scale = self.scale(blocks)
        # The largest element may come out an ulp of float32 above L. It still rounds to
        # L: only numbers that are half a step of the small format above L overflow.
        small = (blocks * _over(self.top, scale)).astype(self.dtype)
        return self.packed(lax.bitcast_convert_type(small, jnp.uint8), scale), state

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        codes, scale = self.parted(payload, n)
        q = lax.bitcast_convert_type(codes, self.dtype).astype(jnp.float32)
        return (q * (scale / self.top)).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Sign(Blocks):
    """Codec that sends only signs; see `sign`."""

    block: int
    bits: int = dataclasses.field(default=1, init=False)
    # Large and small elements decode to the same magnitude.
    needs_feedback = True

    def scale(self, blocks: jax.Array) -> jax.Array:
        # The mean magnitude. The sum of undivided elements could overflow. The division
        # is exact, because the block size is a power of two.
        return jnp.sum(jnp.abs(blocks) * (1 / self.block), axis=1, keepdims=True)

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        blocks = self._blocks(x)
        return self.packed((blocks < 0).astype(jnp.uint8), self.scale(blocks)), state

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        codes, scale = self.parted(payload, n)
        return jnp.where(codes > 0, -scale, scale).reshape(-1)


@dataclasses.dataclass(frozen=True)
class TwoBits(Sign):
    """Codec that also sends whether elements are large; see `int2`."""

    bits: int = dataclasses.field(default=2, init=False)

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        blocks = self._blocks(x)
        scale = self.scale(blocks)
        large = jnp.abs(blocks) > 5 / 4 * scale
        codes = (blocks < 0).astype(jnp.uint8) + 2 * large.astype(jnp.uint8)
        return self.packed(codes, scale), state

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        codes, scale = self.parted(payload, n)
        magnitude = jnp.where(codes > 1, 15 / 8, 5 / 8) * scale
        return jnp.where(codes % 2 == 1, -magnitude, magnitude).reshape(-1)


def int8(block: int = 256) -> Integers:
    r"""Returns a codec with eight-bit integers and one scale per block of elements.

    An element `x` of a block whose largest magnitude is `s` is sent as the integer

    $$q = \mathrm{round}(127 x / s)$$

    and decodes to `s q / 127`. The error is at most `s / 254`. The payload has
    `1 + 4 / block` bytes per element. `stochastic` can wrap the codec.

    `quantize(8)` has one range of levels for the whole vector. Here an outlier affects
    only its own block. `fp8` is more accurate for small elements of a block, and less
    accurate for large ones.

    Args:
      block: The number of elements that share a scale, a power of two and at least 8.

    Examples:
      The largest magnitude is 254, so the levels are 2 apart:

      >>> codec = int8(block=8)
      >>> x = jnp.float32([254, 2.4, 3.1, -100.7, 0, 0, 0, 0])
      >>> payload, _ = codec.encode(x, ())
      >>> codec.decode(payload, 8).tolist()
      [254.0, 2.0, 4.0, -100.0, 0.0, 0.0, 0.0, 0.0]

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021,
      https://arxiv.org/abs/2110.02861
    """
    return Integers(8, check_block(block))


def int4(block: int = 64) -> Integers:
    r"""Returns a codec with four-bit integers and one scale per block of elements.

    An element `x` of a block whose largest magnitude is `s` is sent as the integer

    $$q = \mathrm{round}(7 x / s)$$

    and decodes to `s q / 7`. The error is at most `s / 14`. Two integers share a byte,
    so that the payload has `1/2 + 4 / block` bytes per element.

    With the default blocks, `int8` sends 1.8 times as many bytes. With equal blocks,
    its error bound is 18 times smaller. `stochastic` can wrap the codec.

    Args:
      block: The number of elements that share a scale, a power of two and at least 8.

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021,
      https://arxiv.org/abs/2110.02861
    """
    return Integers(4, check_block(block))


def int2(block: int = 256) -> TwoBits:
    r"""Returns a codec with two-bit integers and one scale per block of elements.

    An element `x` of a block whose mean magnitude is `m` is sent as the nearest of the
    four odd integers `q` from -3 to 3, and decodes to

    $$y = \frac{5}{8} m q$$

    which is the best spacing for normal random numbers. The error is at most `5 m / 8`,
    or `|x| - 15 m / 8` if that is more. Four integers share a byte, so that the payload
    has `1/4 + 4 / block` bytes per element.

    Small elements become larger and the largest ones smaller, so use this codec only
    with `error_feedback`. For normal random numbers, the error is 34 % of the vector's
    norm. That of `sign` is 60 %, for half the bits, and that of `int4` 11 %, for twice
    the bits. If some elements of a block are much larger than the others, use
    `rotated(int2(), key)`.

    Args:
      block: The number of elements that share a scale, a power of two and at least 8.

    Examples:
      The mean magnitude is 1.6, so the levels are -3, -1, 1 and 3:

      >>> codec = int2(block=8)
      >>> x = jnp.float32([1.6, -2.4, 3.2, -1.6, 0, 1.2, -2.8, 0])
      >>> payload, _ = codec.encode(x, ())
      >>> payload.nbytes, codec.decode(payload, 8).tolist()
      (6, [1.0, -3.0, 3.0, -1.0, 1.0, 1.0, -3.0, 1.0])

    References:
      Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019,
      https://arxiv.org/abs/1901.09847
    """
    return TwoBits(check_block(block))


def fp4(block: int = 32) -> Float4:
    r"""Returns a codec with four-bit floats (E2M1) and one scale per block of elements.

    An element `x` of a block whose largest magnitude is `s` is sent as the four-bit
    float

    $$q = \mathrm{fp4}(6 x / s)$$

    one of 0, 1/2, 1, 3/2, 2, 3, 4 and 6 and their negatives. It decodes to `s q / 6`.
    The error is at most `|x| / 4`, or `s / 24` if that is more. Two floats share a
    byte, so that the payload has `1/2 + 4 / block` bytes per element. `stochastic` can
    wrap the codec.

    With equal blocks, `int4` sends as many bytes, and its error is at most `s / 14` for
    every element. `fp4` has the smaller bound for elements below about `s / 3`.

    The floats are those of the formats MXFP4 and NVFP4. Their scales have eight bits,
    for blocks of 32 and 16 elements. Here, scales are float32, as in the other codecs.

    Args:
      block: The number of elements that share a scale, a power of two and at least 8.

    Examples:
      The largest magnitude is 6, so the codes are the elements rounded to E2M1:

      >>> codec = fp4(block=8)
      >>> x = jnp.float32([6, 4.9, 3.4, 1.2, -0.7, 0.2, 0, 0])
      >>> payload, _ = codec.encode(x, ())
      >>> codec.decode(payload, 8).tolist()
      [6.0, 4.0, 3.0, 1.0, -0.5, 0.0, 0.0, 0.0]

    References:
      Rouhani et al., Microscaling Data Formats for Deep Learning, 2023,
      https://arxiv.org/abs/2310.10537
    """
    return Float4(block=check_block(block))


def fp8(format: Literal["e4m3", "e5m2"] = "e4m3", block: int = 256) -> Float8:
    r"""Returns a codec with eight-bit floats and one scale per block of elements.

    An element `x` of a block whose largest magnitude is `s` is sent as the eight-bit
    float

    $$q = \mathrm{fp8}(L x / s)$$

    where `L` is the largest finite number of the format. It decodes to `s q / L`. The
    payload has `1 + 4 / block` bytes per element.

    - e4m3 has 3 mantissa bits and numbers from 2^-9 to 448. The error is at most
      `2^-4 |x|`.
    - e5m2 has 2 mantissa bits and numbers from 2^-16 to 57,344. The error is at most
      `2^-3 |x|`.

    If `|q|` is below the smallest normal number of the format, 2^-6 for e4m3 and 2^-14
    for e5m2, the absolute error is at most the bound at that number.

    `int8` sends as many bytes, and its error is at most `s / 254` for every element.
    `fp8` has the smaller bound for elements below about `s / 16` with e4m3, or `s / 32`
    with e5m2.

    Args:
      format: The format of the codes, `"e4m3"` or `"e5m2"`.
      block: The number of elements that share a scale, a power of two and at least 8.

    Raises:
      ValueError: If `format` or `block` breaks its rule.

    Examples:
      The largest magnitude is 448, so the codes are the elements rounded to e4m3:

      >>> codec = fp8(block=8)
      >>> payload, _ = codec.encode(jnp.float32([448, 101, 20, 1.1, 0, 0, 0, 0]), ())
      >>> codec.decode(payload, 8).tolist()
      [448.0, 104.0, 20.0, 1.125, 0.0, 0.0, 0.0, 0.0]

    References:
      Micikevicius et al., FP8 Formats for Deep Learning, 2022,
      https://arxiv.org/abs/2209.05433
    """
    dtypes = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
    if format not in dtypes:
        raise ValueError(
            f"`format` must be 'e4m3' or 'e5m2', the formats of eight bits; got"
            f" {format!r}."
        )
    return Float8(dtypes[format], check_block(block))


def sign(block: int = 1024) -> Sign:
    r"""Returns a codec that sends one bit per element and one scale per block.

    An element `x` of a block whose mean magnitude is `s` decodes to

    $$y = s \cdot \mathrm{sign}(x)$$

    where `sign(0)` is 1. The payload has `1/8 + 4 / block` bytes per element. With the
    default blocks, that is 23 % of the bytes of `int4`. The error is `||x| - s|`, which
    may be larger than the element itself, so use this codec only with `error_feedback`.

    Args:
      block: The number of elements that share a scale, a power of two and at least 8.

    Examples:
      >>> codec = sign(block=8)
      >>> payload, _ = codec.encode(jnp.float32([1, -1, 2, -2, 3, -3, 4, -8]), ())
      >>> codec.decode(payload, 8).tolist()
      [3.0, -3.0, 3.0, -3.0, 3.0, -3.0, 3.0, -3.0]

    References:
      Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019,
      https://arxiv.org/abs/1901.09847
    """
    return Sign(check_block(block))


def check_block(block: int) -> int:
    if not is_integer(block, 8) or block & (block - 1):
        raise ValueError(
            f"`block` must be a power of two of at least 8; got {block!r}. Sizes of 64"
            " to 1024 are usual: smaller blocks have smaller errors and more scales to"
            " send."
        )
    return operator.index(block)


def _over(top: float, scale: jax.Array) -> jax.Array:
    """Returns `top / scale`, or 0 for a block whose scale is below `SMALL`."""
    # The inner maximum keeps the branch that is not taken finite.
    return jnp.where(scale < SMALL, 0.0, top / jnp.maximum(scale, SMALL))
