"""The codec that sends every bit, used by algorithms that are given no codec."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax._internal.bits import from_words, to_words
from pipejax._internal.ravel import Shapes

from ._codec import Codec


@dataclasses.dataclass(frozen=True)
class AllBits(Codec):
    """Codec that sends every bit of a float32 or float64 vector.

    Vectors of other floating dtypes are sent as `dtype`. `cast("float32")` differs in
    that it rounds float64 vectors to float32.
    """

    dtype: str = "float32"

    def of(
        self,
        shapes: Shapes | None = None,
        dtype: DTypeLike = jnp.float32,
        devices: int = 1,
    ) -> "AllBits":
        return AllBits(jnp.dtype(dtype).name)

    def size(self, n: int) -> int:
        return n * jnp.dtype(self.dtype).itemsize

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        return to_words(x.astype(self.dtype), jnp.uint32), state

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        return from_words(payload, self.dtype)
