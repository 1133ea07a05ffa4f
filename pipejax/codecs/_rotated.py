"""Codecs that see a rotated vector, in which no element is much larger than the others.

A block of n elements with a single one that is not zero, `x`, has n elements of
magnitude `|x| / sqrt(n)` once it is rotated. A block of equal elements has a few large
ones if it is multiplied by a Hadamard matrix alone. Random signs before the
multiplication make this as unlikely as for any other block: whatever the block, its
rotated elements are distributed nearly as normal random numbers of mean zero.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pipejax._internal.bits import from_words, to_words, unpack
from pipejax._internal.keys import key_of
from pipejax._internal.ravel import Shapes

from ._blocks import check_block
from ._check import check_inner
from ._codec import Codec
from ._rounding import check_key


class RotatedState(NamedTuple):
    key: jax.Array  # from which the signs of the next vectors are drawn
    codec: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Rotated(Codec):
    """Encodes the rotated vector with `codec`; see `rotated`."""

    codec: Codec
    key: jax.Array
    block: int

    @property
    def multiple(self) -> int:
        return math.lcm(self.block, self.codec.multiple)

    @property
    def needs_feedback(self) -> bool:
        return self.codec.needs_feedback

    def of(
        self,
        shapes: Shapes | None = None,
        dtype: DTypeLike = jnp.float32,
        devices: int = 1,
    ) -> "Rotated":
        return dataclasses.replace(self, codec=self.codec.of(shapes, dtype, devices))

    def init(self, n: int, seed: jax.Array) -> RotatedState:
        key = jax.random.key_data(jax.random.fold_in(self.key, seed))
        return RotatedState(key, self.codec.init(n, seed))

    def size(self, n: int) -> int:
        return self.codec.size(n) + 4  # the seed of the signs

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Returns the payload of the rotated vector, and then the seed of the signs."""
        impl = jax.random.key_impl(self.key)
        key, now = jax.random.split(jax.random.wrap_key_data(state.key, impl=impl))
        # 32 bits go on the wire, in place of the whole data of a key.
        seed = jax.random.bits(now, (1,), jnp.uint32)
        blocks = x.astype(jnp.float32).reshape(-1, self.block) * self._signs(seed)
        payload, inner = self.codec.encode(hadamard(blocks).reshape(-1), state.codec)
        payload = jnp.concatenate([payload, to_words(seed, payload.dtype)])
        return payload, RotatedState(jax.random.key_data(key), inner)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        split = self.codec.size(n) // payload.dtype.itemsize
        seed = from_words(payload[split:], jnp.uint32)
        blocks = self.codec.decode(payload[:split], n).reshape(-1, self.block)
        return (hadamard(blocks) * self._signs(seed)).reshape(-1)

    def _signs(self, seed: jax.Array) -> jax.Array:
        """Draws the signs of the elements of a block, `[1, n]`, for all blocks."""
        # Each block is rotated at random, which is all that its errors depend on.
        bits = jax.random.bits(key_of(seed[0]), (self.block // 8,), jnp.uint8)
        return 1 - 2 * unpack(bits, 1).astype(jnp.float32)[None]


def rotated(codec: Codec, key: jax.Array, block: int = 1024) -> Rotated:
    r"""Wraps a codec so that it encodes a randomly rotated vector.

    A block `x` of n elements is sent as `C(y)`, where C is the codec and

    $$y = \frac{1}{\sqrt n} H D x$$

    H is the Hadamard matrix, which has only the elements 1 and -1, and D is a diagonal
    matrix of random signs. The product is orthonormal and is undone after decoding:

    $$x \approx \frac{1}{\sqrt n} D H C(y)$$

    An outlier is thereby spread over its whole block. In an unrotated block, the codecs
    with a scale for each block make the levels as coarse as the outlier is large, and
    round all small elements to zero in every step. In a rotated block, the error is
    about the same for every element, and its sign is random. `int4` can then do without
    `error_feedback` and the memory of its residuals. With other codecs,
    `error_feedback(rotated(codec, key))` is possible, too. In contrast to `stochastic`,
    `rotated` keeps the smaller error of rounding to the nearest level.
    `rotated(stochastic(codec, key), key)` has no bias at all.

    Every vector has signs of its own, on every device. With the same signs in all
    steps, an element that rounding makes smaller in one step could be made smaller in
    all of them, and devices with similar gradients would make similar errors. The signs
    follow from a seed, which is sent and takes 4 bytes per vector. Beyond these, the
    payload is that of the codec. It is padded to whole blocks.

    Args:
      codec: The codec of the rotated vector, for example `int4()`.
      key: A key from `jax.random.key`, from which each place where an algorithm encodes
        derives its own.
      block: n, the number of elements that are rotated together, a power of two and at
        least 8. It may differ from the block of the codec.

    Returns:
      A codec whose payload is that of `codec` and the seed of the signs.

    Raises:
      ValueError: If `codec` is not a codec, is linear or has error feedback, or if
        `key` or `block` breaks its rule.

    Examples:
      The levels of `int4` are 1 apart, so that 0.3 becomes 0:

      >>> from pipejax import codecs
      >>> x = jnp.full(2048, 0.3).at[::1024].set(7.0)
      >>> int4 = codecs.int4(block=1024)
      >>> for codec in (int4, rotated(int4, jax.random.key(0))):
      ...     payload, _ = codec.encode(x, codec.init(2048, jnp.uint32(0)))
      ...     decoded = codec.decode(payload, 2048)[1:1024]
      ...     print(payload.nbytes, f"{decoded.mean():.2f}")
      1032 0.00
      1036 0.30

    References:
      Suresh et al., Distributed Mean Estimation with Limited Communication, 2017,
      https://arxiv.org/abs/1611.00429

      Vargaftik et al., DRIVE, 2021, https://arxiv.org/abs/2105.08339

      Vargaftik et al., EDEN, 2022, https://arxiv.org/abs/2108.08842
    """
    check_key(key)
    return Rotated(check_inner("codec", codec), key, check_block(block))


def hadamard(blocks: jax.Array) -> jax.Array:
    """Multiplies each row, float32 `[b, n]`, by the Hadamard matrix over `sqrt(n)`.

    The product is its own inverse.
    """
    # The Hadamard matrix of n = c d elements is the Kronecker product of those of c and
    # d. Two matrix products of 32 x 32 take a CPU a quarter of the time of the ten
    # additions that each element takes part in for n = 1024, each of which reads and
    # writes the whole vector.
    n = blocks.shape[1]
    c = 2 ** (n.bit_length() // 2)
    left, right = _matrix(c), _matrix(n // c)
    # Scaled first, because the sums could overflow. TPUs and GPUs would otherwise round
    # the elements to fewer bits.
    pieces = (blocks * n**-0.5).reshape(-1, c, n // c)
    product = jnp.einsum("ij,bjk,kl->bil", left, pieces, right, precision="highest")
    return product.reshape(blocks.shape)


def _matrix(n: int) -> np.ndarray:
    """Returns the Hadamard matrix of n x n elements, n a power of two."""
    if n == 1:
        return np.ones((1, 1), np.float32)
    half = _matrix(n // 2)
    return np.block([[half, half], [half, -half]])
