"""Linear quantization between the minimum and the maximum of a whole vector."""

import dataclasses
import operator

import jax
import jax.numpy as jnp

from pipejax._internal.bits import from_words, pack, poison, to_words, unpack
from pipejax._internal.integers import is_integer

from ._rounding import Rounding, to_integer


@dataclasses.dataclass(frozen=True)
class Quantize(Rounding):
    """Has equally spaced levels for the whole vector; see `quantize`."""

    bits: int

    @property
    def multiple(self) -> int:
        """Returns the number of codes that fill a byte."""
        return 8 // self.bits

    @property
    def top(self) -> int:
        return 2**self.bits - 1

    def size(self, n: int) -> int:
        """Returns the size in bytes of the codes, the minimum and the level spacing."""
        return n * self.bits // 8 + 8

    def rounded(self, x: jax.Array, noise: jax.Array | None) -> jax.Array:
        x = x.astype(jnp.float32)
        low, level = self._levels(x)
        # The difference of two finite numbers may overflow, and `1 / level` may be
        # subnormal, which is zero on most devices. Neither happens after a division by
        # 4.
        above = (x / 4 - low / 4) * jnp.where(level > 0, 4 / level, 0.0)
        codes = jnp.clip(to_integer(above, noise, self.top), 0, self.top)
        packed = pack(codes.astype(jnp.uint8), self.bits)
        return jnp.concatenate([packed, to_words(jnp.stack([low, level]))])

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        coded = n * self.bits // 8
        low, level = from_words(payload[coded:], jnp.float32)
        codes = unpack(payload[:coded], self.bits).astype(jnp.float32)
        return low + codes * level

    def _levels(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the minimum and the level spacing, NaN unless `x` is finite."""
        low, high = jnp.min(x, initial=jnp.inf), jnp.max(x, initial=-jnp.inf)
        level = high / self.top - low / self.top + poison(x)
        # Treat levels as equal if float32 cannot divide by their spacing.
        return low, jnp.where(level < 2.0**-100, level * 0, level)


def quantize(bits: int = 8) -> Quantize:
    r"""Returns a codec with equally spaced levels for the whole vector.

    This is the linear quantization of the Pipe-SGD paper. An element `x` has the code

    $$q = \mathrm{round}((x - x_{min}) / d)$$

    with the level spacing

    $$d = (x_{max} - x_{min}) / (2^{bits} - 1)$$

    and the element decodes to `x_min + q d`, with an error of at most `d / 2`. A single
    outlier widens the spacing of all levels. `int8` and `int4` instead have separate
    levels for each block of neighboring elements. `stochastic` can wrap the codec.

    Where `x_max - x_min` exceeds 3.4e38, which float32 cannot hold, elements may decode
    to infinity or NaN.

    Args:
      bits: The number of bits per element: 8, 4, 2 or 1. The payload has 8 more bytes
        per vector, for the minimum and the level spacing.

    Raises:
      ValueError: If `bits` is not 8, 4, 2 or 1.

    Examples:
      >>> codec = quantize()
      >>> payload, _ = codec.encode(jnp.float32([-1.0, 0.3, 1.0]), ())
      >>> codec.decode(payload, 3)
      Array([-1.        ,  0.30196083,  1.        ], dtype=float32)

    References:
      Li et al., Pipe-SGD, 2018, https://arxiv.org/abs/1811.03619
    """
    if not is_integer(bits, 1) or bits not in (1, 2, 4, 8):
        raise ValueError(
            f"`bits` must be 8, 4, 2 or 1; got {bits!r}. For 16 bits, use"
            " pj.codecs.bf16() or truncate()."
        )
    return Quantize(operator.index(bits))
