"""Codecs that send few bits per element and one float32 scale per block of elements.

The payload is a vector of bytes: the codes of all blocks, followed by all scales. `L`
is the largest code, and `s` the scale of a block. Codes of fewer than eight bits share
bytes: byte j of m holds the codes of the elements j, j + m, j + 2 m and so on, the
first of them in the lowest bits.

NaN and infinity decode to NaN. For `fp8`, NaN is a number of the format. For `int8`,
`int4` and `fp4`, the unused integer `-(L + 1)` stands for NaN. For `sign` and `int2`,
the scale is NaN or infinite, because the mean is not finite if an element is not. For
the other codecs the scale alone would not be enough: on CPUs, XLA's maximum of 4,096 or
more elements loses NaN, https://github.com/openxla/xla/issues/21461
"""

import abc
import functools
import operator
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pipejax._internal.bits import from_words, to_words
from pipejax._internal.fusion import unfused
from pipejax._internal.integers import is_integer

from ._rounding import Rounding

# A block whose scale is smaller than this decodes to zeros. `L / scale` could overflow,
# and gradients of this size do not change the parameters.
SMALL = 2.0**-100


class Blocks(Rounding):
    # On CPUs, `unfused` keeps encoding and decoding vectorized, whatever an exchange
    # does before and after them.
    block: int
    bits: int

    @property
    def takes_noise(self) -> bool:
        return False

    @property
    def multiple(self) -> int:
        return self.block * 8 // self.bits

    def size(self, n: int) -> int:
        return n * self.bits // 8 + 4 * (n // self.block)

    def scale(self, blocks: jax.Array) -> jax.Array:
        """Returns the largest magnitude in each block: `[b, block]` to `[b, 1]`."""
        return jnp.max(jnp.abs(blocks), axis=1, keepdims=True)

    @abc.abstractmethod
    def codes(
        self, blocks: jax.Array, scale: jax.Array, noise: jax.Array | None
    ) -> jax.Array:
        """Returns the codes, uint8 `[b, block]`, of blocks with the scale `[b, 1]`."""

    @abc.abstractmethod
    def numbers(self, codes: jax.Array, scale: jax.Array) -> jax.Array:
        """Undoes `codes`."""

    def rounded(self, x: jax.Array, noise: jax.Array | None) -> jax.Array:
        return unfused(self._rounded, x, noise)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        return unfused(functools.partial(self._decoded, n=n), payload)

    def _rounded(self, x: jax.Array, noise: jax.Array | None) -> jax.Array:
        blocks = self._rows(x.astype(jnp.float32))
        scale = self.scale(blocks)
        parts = []
        # The codes of each place in a byte are computed from rows of their own, also in
        # `decode`. With `pack` and `unpack`, which work on the codes of all rows,
        # XLA:CPU does not vectorize the computation.
        for shift, rows in self._places(blocks):
            drawn = None if noise is None else self._rows(noise)[rows]
            parts.append(self.codes(blocks[rows], scale[rows], drawn) << shift)
        packed = functools.reduce(operator.or_, parts)
        return jnp.concatenate([packed.reshape(-1), to_words(scale)])

    def _decoded(self, payload: jax.Array, n: int) -> jax.Array:
        coded = n * self.bits // 8
        packed = self._rows(payload[:coded])
        scale = from_words(payload[coded:], jnp.float32)[:, None]
        parts = [
            self.numbers((packed >> shift) & (2**self.bits - 1), scale[rows])
            for shift, rows in self._places(scale)
        ]
        return jnp.concatenate(parts).reshape(-1)

    def _rows(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, self.block)

    def _places(self, rows: jax.Array) -> Iterator[tuple[int, slice]]:
        """Yields the shift of each place in a byte, and the rows whose codes it has."""
        many = len(rows) * self.bits // 8
        for i, shift in enumerate(range(0, 8, self.bits)):
            yield shift, slice(i * many, (i + 1) * many)


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
