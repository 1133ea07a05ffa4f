"""Codecs with floats of eight or four bits, and one scale per block of elements."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from ._blocks import Blocks, check_block, over
from ._integers import Integers


@dataclasses.dataclass(frozen=True)
class Float8(Blocks):
    """Codec with eight-bit floats as codes; see `fp8`."""

    dtype: str
    block: int
    bits: int = dataclasses.field(default=8, init=False)

    @property
    def top(self) -> float:
        return float(jnp.finfo(self.dtype).max)

    def codes(
        self, blocks: jax.Array, scale: jax.Array, noise: jax.Array | None
    ) -> jax.Array:
        del noise
        # The largest element may come out an ulp of float32 above L. It still rounds to
        # L: only numbers that are half a step of the small format above L overflow.
        small = (blocks * over(self.top, scale)).astype(self.dtype)
        return lax.bitcast_convert_type(small, jnp.uint8)

    def numbers(self, codes: jax.Array, scale: jax.Array) -> jax.Array:
        q = lax.bitcast_convert_type(codes, self.dtype).astype(jnp.float32)
        return q * (scale / self.top)


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
    def levels(self, units: jax.Array) -> jax.Array:
        y = jnp.abs(units)
        place = jnp.where(y < 2, 2 * y, jnp.where(y < 4, y + 2, y / 2 + 4))
        return jnp.copysign(place, units)

    def units(self, levels: jax.Array) -> jax.Array:
        q = jnp.abs(levels)
        y = jnp.where(q < 4, q / 2, jnp.where(q < 6, q - 2, 2 * q - 8))
        return jnp.copysign(y, levels)


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


def fp4(block: int = 32) -> Float4:
    r"""Returns a codec with four-bit floats (E2M1) and one scale per block of elements.

    An element `x` of a block whose largest magnitude is `s` is sent as the four-bit
    float

    $$q = \mathrm{fp4}(6 x / s)$$

    one of 0, 1/2, 1, 3/2, 2, 3, 4 and 6 and their negatives. It decodes to `s q / 6`.
    The error is at most `|x| / 4`, or `s / 24` if that is more. Two floats share a
    byte, so that the payload has `1/2 + 4 / block` bytes per element. A vector is
    padded to an even number of blocks. `stochastic` can wrap the codec.

    With equal blocks, `int4` sends as many bytes, and its error is at most `s / 14` for
    every element. `fp4` has the smaller bound for elements below about `s / 3`.

    The floats are those of the formats MXFP4 and NVFP4. Their scales have eight bits,
    for blocks of 32 and 16 elements. Here, scales are float32, as in the other codecs.

    Args:
      block: The number of elements that share a scale, a power of two and at least 8.

    Examples:
      The largest magnitude is 6, so the codes are the elements rounded to E2M1:

      >>> codec = fp4(block=8)
      >>> x = jnp.zeros(16).at[:6].set(jnp.float32([6, 4.9, 3.4, 1.2, -0.7, 0.2]))
      >>> payload, _ = codec.encode(x, ())
      >>> codec.decode(payload, 16)[:6].tolist()
      [6.0, 4.0, 3.0, 1.0, -0.5, 0.0]

    References:
      Rouhani et al., Microscaling Data Formats for Deep Learning, 2023,
      https://arxiv.org/abs/2310.10537
    """
    return Float4(block=check_block(block))
