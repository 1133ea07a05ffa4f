"""Floating dtypes: all bits, or the upper ones, rounded or cut off."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax.bits import from_words, to_words

from ._codec import Codec
from ._rounding import Rounding

_WORDS = {2: jnp.uint16, 4: jnp.uint32}


@dataclasses.dataclass(frozen=True)
class Cast(Rounding):
    """See `cast`."""

    dtype: str

    @property
    def unbiased(self) -> bool:
        """Only if nothing is lost."""
        return self.dtype == "float32"

    @property
    def takes_noise(self) -> bool:
        """Only bfloat16, whose bits are the upper half of float32."""
        return self.dtype == "bfloat16"

    def size(self, n: int) -> int:
        """2 or 4 bytes an element."""
        return n * jnp.dtype(self.dtype).itemsize

    def rounded(self, x: jax.Array, noise: jax.Array | None) -> jax.Array:
        """x in this dtype, as integers of its width."""
        x = x.astype(jnp.float32)
        if noise is not None:
            x = self._dithered(x, noise)
        word = _WORDS[jnp.dtype(self.dtype).itemsize]
        return to_words(x.astype(self.dtype), word)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """The same numbers, as float32."""
        del n
        return from_words(payload, self.dtype).astype(jnp.float32)

    def bound(self, x: jax.Array) -> jax.Array:
        """Half a unit in the last place; infinite for what overflows."""
        info = jnp.finfo(self.dtype)
        if self.dtype == "float32":
            return jnp.zeros_like(x)
        # Between two floats there are nmant bits; below the least normal one, its.
        least, most = float(info.smallest_normal), float(info.max)
        ulp = jnp.maximum(jnp.abs(x), least) * 2.0 ** -(info.nmant + 1)
        return jnp.where(jnp.abs(x) <= most, ulp, jnp.inf)

    def _dithered(self, x: jax.Array, noise: jax.Array) -> jax.Array:
        """x moved up by less than a unit of bfloat16, and cut off there."""
        bits = to_words(x, jnp.uint32)
        moved = bits + (noise * 2**16).astype(jnp.uint32)
        cut = from_words(moved & jnp.uint32(0xFFFF0000), jnp.float32)
        # A NaN of all ones would be moved to zero.
        return jnp.where(jnp.isfinite(x), cut, x)


@dataclasses.dataclass(frozen=True)
class Truncate(Codec):
    """See `truncate`."""

    @property
    def needs_feedback(self) -> bool:
        """Every element shrinks."""
        return True

    def size(self, n: int) -> int:
        """2 bytes an element."""
        return 2 * n

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """The upper half of each float32."""
        bits = to_words(x.astype(jnp.float32), jnp.uint32)
        return (bits >> 16).astype(jnp.uint16), state

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """Zeros for the lower half."""
        del n
        return from_words(payload.astype(jnp.uint32) << 16, jnp.float32)

    def bound(self, x: jax.Array) -> jax.Array:
        """One unit in the last of 7 bits."""
        tiny = float(jnp.finfo(jnp.float32).smallest_normal)
        return jnp.maximum(jnp.abs(x), tiny) * 2.0**-7


def cast(dtype: DTypeLike) -> Cast:
    """Travels as float32, bfloat16 or float16, rounded to the nearest.

    float32 loses nothing. float16 overflows at 65,504, and the step is then skipped.
    Error: `2^-8 |x|` in bfloat16, `2^-11 |x|` in float16, 2^-25 at least.

    Raises:
      ValueError: for another dtype.

    >>> codec = cast("bfloat16")
    >>> codec.decode(codec.encode(jnp.float32([1 / 3]), ())[0], 1)
    Array([0.33398438], dtype=float32)
    """
    name = jnp.dtype(dtype).name
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"`dtype` must be float32, bfloat16 or float16, got {name}. Of eight bits"
            " there are pj.codecs.int8() and fp8()."
        )
    return Cast(name)


def bf16() -> Cast:
    """`cast("bfloat16")`: 16 bits, rounded to the nearest."""
    return Cast("bfloat16")


def truncate() -> Truncate:
    """The paper's truncation: float32 without its lower 16 bits.

    It is `bf16` rounded towards zero: `0 <= 1 - decode(x)/x < 2^-7`, where `bf16` has
    `|1 - decode(x)/x| <= 2^-8`. All gradients shrink by 0.2 % or so.

    Reference: Li et al., Pipe-SGD, 2018, https://arxiv.org/abs/1811.03619

    >>> codec = truncate()
    >>> codec.decode(codec.encode(jnp.float32([1 / 3]), ())[0], 1)
    Array([0.33203125], dtype=float32)
    """
    return Truncate()
