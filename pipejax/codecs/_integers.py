"""Codecs with integers of eight or four bits, and one scale per block of elements."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ._blocks import Blocks, check_block, over
from ._rounding import to_integer


@dataclasses.dataclass(frozen=True)
class Integers(Blocks):
    """Codec with integer codes; see `int8` and `int4`."""

    bits: int
    block: int

    @property
    def takes_noise(self) -> bool:
        return True

    @property
    def top(self) -> int:
        return 2 ** (self.bits - 1) - 1

    @property
    def peak(self) -> float:
        """Returns the number that the largest magnitude of a block is scaled to."""
        return self.top

    def levels(self, units: jax.Array) -> jax.Array:
        """Returns where numbers lie among the levels, whose places are the integers."""
        return units

    def units(self, levels: jax.Array) -> jax.Array:
        """Returns the numbers at the given places, which are integers."""
        return levels

    def codes(
        self, blocks: jax.Array, scale: jax.Array, noise: jax.Array | None
    ) -> jax.Array:
        # This is one division a block, in place of one an element.
        units = blocks * over(self.peak, scale)
        q = to_integer(self.levels(units), noise, self.top)
        # `units` is NaN for an infinite element too. Its scale is infinite, so that
        # `top / scale` is 0, and infinity times 0 is NaN.
        q = jnp.where(jnp.isnan(units), -self.top - 1, q)
        codes = lax.bitcast_convert_type(q.astype(jnp.int8), jnp.uint8)
        # The lower four bits of a byte are the same integer in four bits.
        return codes if self.bits == 8 else codes & 15

    def numbers(self, codes: jax.Array, scale: jax.Array) -> jax.Array:
        if self.bits < 8:
            codes = (codes ^ 8) - 8  # extends the sign bit of the four-bit integer
        q = lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)
        # An infinite scale makes every element of the block NaN, because zero times
        # infinity is NaN. The scale is divided first because `q * scale` may overflow.
        numbers = self.units(q) * (scale / self.peak)
        return jnp.where(q < -self.top, jnp.nan, numbers)


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
    so that the payload has `1/2 + 4 / block` bytes per element. A vector is padded to
    an even number of blocks.

    With the default blocks, `int8` sends 1.8 times as many bytes. With equal blocks,
    its error bound is 18 times smaller. `stochastic` can wrap the codec.

    Args:
      block: The number of elements that share a scale, a power of two and at least 8.

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021,
      https://arxiv.org/abs/2110.02861
    """
    return Integers(4, check_block(block))
