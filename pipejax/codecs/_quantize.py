"""The paper's linear quantisation: one minimum and one maximum for a whole message."""

import dataclasses

import jax
import jax.numpy as jnp

from pipejax.bits import from_words, pack, poison, to_words, unpack

from ._rounding import Rounding, to_integer


@dataclasses.dataclass(frozen=True)
class Quantize(Rounding):
    """See `quantize`."""

    bits: int

    @property
    def multiple(self) -> int:
        """Whole bytes."""
        return 8 // self.bits

    @property
    def top(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    def size(self, n: int) -> int:
        """The codes, the minimum and the distance of two levels."""
        return n * self.bits // 8 + 8

    def rounded(self, x: jax.Array, noise: jax.Array | None) -> jax.Array:
        """Codes, then minimum and level."""
        x = x.astype(jnp.float32)
        low, level = self._levels(x)
        # Halves, for the distance of two finite numbers may be infinite.
        above = (x / 2 - low / 2) * jnp.where(level > 0, 2 / level, 0.0)
        codes = jnp.clip(to_integer(above, noise, self.top), 0, self.top)
        packed = pack(codes.astype(jnp.uint8), self.bits)
        return jnp.concatenate([packed, to_words(jnp.stack([low, level]))])

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """`min + q level`."""
        coded = n * self.bits // 8
        low, level = from_words(payload[coded:], jnp.float32)
        codes = unpack(payload[:coded], self.bits).astype(jnp.float32)
        return low + codes * level

    def bound(self, x: jax.Array) -> jax.Array:
        """Half the distance of two levels, and rounding of float32."""
        low, level = self._levels(x)
        spread = jnp.max(x, initial=-jnp.inf) - low
        # Of one level all are the minimum; what spreads too far may overflow.
        all_one = (level == 0) | jnp.isinf(spread)
        rounding = 1e-6 * (jnp.max(jnp.abs(x), initial=0.0) + level)
        return jnp.where(all_one, spread, level / 2) + rounding

    def _levels(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        low, high = jnp.min(x, initial=jnp.inf), jnp.max(x, initial=-jnp.inf)
        level = high / self.top - low / self.top + poison(x)
        # Levels too close for float32 to divide by are one level.
        return low, jnp.where(level < 2.0**-100, level * 0, level)


def quantize(bits: int = 8) -> Quantize:
    """Linear quantisation of the whole message, between its minimum and maximum.

      `q = round((x - min) / d)`,  `d = (max - min) / (2^bits - 1)`

    One outlier widens all levels; `int8` has levels for each block.

    Args:
      bits: 8, 4, 2 or 1 an element; 8 bytes more for minimum and distance.

    Raises:
      ValueError: for another number of bits.

    Reference: Li et al., Pipe-SGD, 2018, https://arxiv.org/abs/1811.03619

    >>> codec = quantize()
    >>> codec.decode(codec.encode(jnp.float32([-1.0, 0.3, 1.0]), ())[0], 3)
    Array([-1.        ,  0.30196083,  1.        ], dtype=float32)
    """
    if isinstance(bits, bool) or bits not in (1, 2, 4, 8):
        raise ValueError(
            f"`bits` must be 8, 4, 2 or 1, got {bits!r}. For 16 there are"
            " pj.codecs.bf16() and truncate()."
        )
    return Quantize(bits)
