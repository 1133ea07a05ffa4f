"""Vectors as they are: what an algorithm without a codec sends."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax.bits import from_words, to_words
from pipejax.vectors import Shapes

from ._codec import Codec


@dataclasses.dataclass(frozen=True)
class AllBits(Codec):
    """Sends every bit of a float32 or a float64 vector.

    It differs from `cast("float32")`, which rounds float64 vectors to float32.

    Attributes:
      dtype: of the vectors.
    """

    dtype: str = "float32"

    @property
    def unbiased(self) -> bool:
        """Nothing is lost."""
        return True

    def of(
        self, shapes: Shapes | None = None, dtype: DTypeLike = jnp.float32
    ) -> "AllBits":
        """The codec for vectors of this dtype."""
        return AllBits(jnp.dtype(dtype).name)

    def size(self, n: int) -> int:
        """4 or 8 bytes an element."""
        return n * jnp.dtype(self.dtype).itemsize

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """The bits, in words of 32."""
        return to_words(x.astype(self.dtype), jnp.uint32), state

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """The same numbers."""
        return from_words(payload, self.dtype)

    def bound(self, x: jax.Array) -> jax.Array:
        """Nothing is lost."""
        return jnp.zeros_like(x)
