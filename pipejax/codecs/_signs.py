"""Codecs with one or two bits per element, and the mean magnitude of each block."""

import dataclasses

import jax
import jax.numpy as jnp

from ._blocks import Blocks, check_block


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

    def codes(
        self, blocks: jax.Array, scale: jax.Array, noise: jax.Array | None
    ) -> jax.Array:
        del scale, noise
        return (blocks < 0).astype(jnp.uint8)

    def numbers(self, codes: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.where(codes > 0, -scale, scale)


@dataclasses.dataclass(frozen=True)
class TwoBits(Sign):
    """Codec that also sends whether elements are large; see `int2`."""

    bits: int = dataclasses.field(default=2, init=False)

    def codes(
        self, blocks: jax.Array, scale: jax.Array, noise: jax.Array | None
    ) -> jax.Array:
        large = jnp.abs(blocks) > 5 / 4 * scale
        return super().codes(blocks, scale, noise) + 2 * large.astype(jnp.uint8)

    def numbers(self, codes: jax.Array, scale: jax.Array) -> jax.Array:
        magnitude = jnp.where(codes > 1, 15 / 8, 5 / 8) * scale
        return jnp.where(codes % 2 == 1, -magnitude, magnitude)


def sign(block: int = 1024) -> Sign:
    r"""Returns a codec that sends one bit per element and one scale per block.

    An element `x` of a block whose mean magnitude is `s` decodes to

    $$y = s \cdot \mathrm{sign}(x)$$

    where `sign(0)` is 1. The payload has `1/8 + 4 / block` bytes per element. With the
    default blocks, that is 23 % of the bytes of `int4`. The error is `||x| - s|`, which
    may be larger than the element itself, so use this codec only with `error_feedback`.
    A vector is padded to a multiple of eight blocks.

    Args:
      block: The number of elements that share a scale, a power of two and at least 8.

    Examples:
      >>> codec = sign(block=8)
      >>> x = jnp.zeros(64).at[:8].set(jnp.float32([1, -1, 2, -2, 3, -3, 4, -8]))
      >>> payload, _ = codec.encode(x, ())
      >>> codec.decode(payload, 64)[:8].tolist()
      [3.0, -3.0, 3.0, -3.0, 3.0, -3.0, 3.0, -3.0]

    References:
      Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019,
      https://arxiv.org/abs/1901.09847
    """
    return Sign(check_block(block))


def int2(block: int = 256) -> TwoBits:
    r"""Returns a codec with two-bit integers and one scale per block of elements.

    An element `x` of a block whose mean magnitude is `m` is sent as the nearest of the
    four odd integers `q` from -3 to 3, and decodes to

    $$y = \frac{5}{8} m q$$

    which is the best spacing for normal random numbers. The error is at most `5 m / 8`,
    or `|x| - 15 m / 8` if that is more. Four integers share a byte, so that the payload
    has `1/4 + 4 / block` bytes per element. A vector is padded to a multiple of four
    blocks.

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
      >>> x = jnp.tile(jnp.float32([1.6, -2.4, 3.2, -1.6, 0, 1.2, -2.8, 0]), 4)
      >>> payload, _ = codec.encode(x, ())
      >>> payload.nbytes, codec.decode(payload, 32)[:8].tolist()
      (24, [1.0, -3.0, 3.0, -1.0, 1.0, 1.0, -3.0, 1.0])

    References:
      Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019,
      https://arxiv.org/abs/1901.09847
    """
    return TwoBits(check_block(block))
