"""Codecs that send few bits per element and one float32 scale per block of elements.

The payload is a vector of bytes: the codes of all blocks, followed by all scales. `L`
is the largest code, and `s` the scale of a block.

NaN and infinity decode to NaN. For `fp8`, NaN is a number of the format. For `int8`,
`int4` and `fp4`, the unused integer `-(L + 1)` stands for NaN. For `sign` and `int2`,
the scale is NaN or infinite, because the mean is not finite if an element is not. For
the other codecs the scale alone would not be enough: on CPUs, XLA's maximum of 4,096 or
more elements loses NaN, https://github.com/openxla/xla/issues/21461
"""

import operator

import jax
import jax.numpy as jnp

from pipejax._internal.bits import from_words, pack, to_words, unpack
from pipejax._internal.integers import is_integer

from ._codec import Codec

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


def check_block(block: int) -> int:
    if not is_integer(block, 8) or block & (block - 1):
        raise ValueError(
            f"`block` must be a power of two of at least 8; got {block!r}. Sizes of 64"
            " to 1024 are usual: smaller blocks have smaller errors and more scales to"
            " send."
        )
    return operator.index(block)


def over(top: float, scale: jax.Array) -> jax.Array:
    """Returns `top / scale`, or 0 for a block whose scale is below `SMALL`."""
    # The inner maximum keeps the branch that is not taken finite.
    return jnp.where(scale < SMALL, 0.0, top / jnp.maximum(scale, SMALL))
