"""Codecs that send floats of 32 or 16 bits: rounded casts, and truncated float32."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax._internal.bits import from_words, to_words
from pipejax._internal.ranges import headroom, is_narrow
from pipejax._internal.ravel import Shapes

from ._codec import Codec
from ._rounding import Rounding

_WORDS = {2: jnp.uint16, 4: jnp.uint32}


@dataclasses.dataclass(frozen=True)
class Cast(Rounding):
    """Casts to a dtype, after a division by `headroom`, a power of two; see `cast`."""

    dtype: str
    headroom: float = 1.0

    @property
    def narrow(self) -> bool:
        return is_narrow(self.dtype)

    @property
    def takes_noise(self) -> bool:
        """Returns `True` for bfloat16, whose bits are the upper half of float32."""
        return self.dtype == "bfloat16"

    def of(
        self,
        shapes: Shapes | None = None,
        dtype: DTypeLike = jnp.float32,
        devices: int = 1,
    ) -> "Cast":
        del shapes, dtype
        if not self.narrow:
            return self
        # Sums over devices must stay in the range of float16.
        return dataclasses.replace(self, headroom=headroom(devices))

    def size(self, n: int) -> int:
        return n * jnp.dtype(self.dtype).itemsize

    def rounded(self, x: jax.Array, noise: jax.Array | None) -> jax.Array:
        # The headroom is a power of two, so that only subnormal numbers lose bits.
        x = x.astype(jnp.float32) / self.headroom
        if noise is not None:
            x = self._dithered(x, noise)
        word = _WORDS[jnp.dtype(self.dtype).itemsize]
        return to_words(x.astype(self.dtype), word)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        del n
        return from_words(payload, self.dtype).astype(jnp.float32) * self.headroom

    def _dithered(self, x: jax.Array, noise: jax.Array) -> jax.Array:
        """Rounds `x` to bfloat16 stochastically."""
        bits = to_words(x, jnp.uint32)
        # Bfloat16 numbers are 2^16 apart in the bits of float32. This moves each
        # element away from zero by the fraction `noise` of that, and the mask then
        # rounds it towards zero.
        moved = bits + (noise * 2**16).astype(jnp.uint32)
        cut = from_words(moved & jnp.uint32(0xFFFF0000), jnp.float32)
        # A NaN whose bits are all ones would wrap around to zero.
        return jnp.where(jnp.isfinite(x), cut, x)


@dataclasses.dataclass(frozen=True)
class AllBits(Cast):
    """Sends every bit of a vector in `dtype`, float32 or float64."""

    dtype: str = "float32"

    def of(
        self,
        shapes: Shapes | None = None,
        dtype: DTypeLike = jnp.float32,
        devices: int = 1,
    ) -> "AllBits":
        return AllBits(jnp.dtype(dtype).name)

    def rounded(self, x: jax.Array, noise: jax.Array | None) -> jax.Array:
        return to_words(x.astype(self.dtype), jnp.uint32)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        return from_words(payload, self.dtype)


@dataclasses.dataclass(frozen=True)
class Truncate(Codec):
    """Drops the lower 16 bits of each float32; see `truncate`."""

    needs_feedback = True  # truncation moves every element towards zero

    def size(self, n: int) -> int:
        return 2 * n

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        bits = to_words(x.astype(jnp.float32), jnp.uint32)
        return (bits >> 16).astype(jnp.uint16), state

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        del n
        return from_words(payload.astype(jnp.uint32) << 16, jnp.float32)


def cast(dtype: DTypeLike) -> Cast:
    """Returns a codec that sends each element in another dtype, rounded to the nearest.

    - float32 takes 4 bytes per element. A float32 vector loses nothing, and a float64
      vector is rounded.
    - bfloat16 takes 2 bytes. The error is at most `2^-8 |x|`. The range is that of
      float32.
    - float16 takes 2 bytes. The error is at most `2^-11 |x|`, or 2^-25 if that is more.
      Numbers beyond 65,504 overflow to infinity, and the train step then skips the
      update. In an all-reduce over p devices, elements travel divided by q, the
      smallest power of two that is not below p. Sums up to 65,504 q therefore do not
      overflow. In return, the error is at most 2^-25 q for small elements.

    In contrast to `truncate`, `cast("bfloat16")` rounds to the nearest number, so that
    its errors do not all have the same sign. `stochastic` can wrap it.

    Args:
      dtype: The dtype of the payload: float32, bfloat16 or float16.

    Raises:
      ValueError: If `dtype` is another dtype.

    Examples:
      >>> codec = cast("bfloat16")
      >>> payload, _ = codec.encode(jnp.float32([1 / 3]), ())
      >>> codec.decode(payload, 1)
      Array([0.33398438], dtype=float32)
    """
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"`dtype` must be float32, bfloat16 or float16; got {name}. For eight bits,"
            " use pj.codecs.int8() or fp8()."
        )
    return Cast(name)


def bf16() -> Cast:
    """Returns the codec `cast("bfloat16")`, which sends 2 bytes per element.

    Examples:
      >>> bf16().size(1000)  # bytes
      2000

    References:
      Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019,
      https://arxiv.org/abs/1905.12322
    """
    return Cast("bfloat16")


def truncate() -> Truncate:
    r"""Returns a codec that drops the lower 16 bits of each float32.

    This is the truncation of the Pipe-SGD paper. It sends 2 bytes per element, as
    `bf16` does, but it rounds towards zero where `bf16` rounds to the nearest number.
    With `x` the element and `y` its decoded value, the relative errors are

    $$0 \le 1 - y / x < 2^{-7}$$

    for `truncate` and

    $$|1 - y / x| \le 2^{-8}$$

    for `bf16`. On average, truncation makes gradients about 0.3 % smaller. Wrap the
    codec in `error_feedback` to avoid this bias.

    References:
      Li et al., Pipe-SGD, 2018, https://arxiv.org/abs/1811.03619
    """
    return Truncate()
