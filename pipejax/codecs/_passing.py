"""All of a vector, or nothing: for what codecs have kept, not for gradients.

Under error feedback the one leaves nothing to be sent later, and the other everything.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax.vectors import Shapes, joined

from ._all_bits import AllBits
from ._codec import Codec, Linear
from ._error_feedback import ErrorFeedback


@dataclasses.dataclass(frozen=True, eq=False)
class Passing(Linear):
    """In place of a codec: vectors are cut and laid out as for that.

    Attributes:
      codec: that.
      passes: whether all is sent; else nothing is.
      sends: the bits of either.
    """

    codec: Codec
    passes: bool
    sends: AllBits = dataclasses.field(default_factory=AllBits)

    @property
    def multiple(self) -> int:
        """As of the codec."""
        return self.codec.multiple

    @property
    def needs_leaves(self) -> bool:
        """Whether the codec does, so that it is given the same arrays."""
        return self.codec.needs_leaves

    @property
    def rounds(self) -> int:
        """One, where the codec has any."""
        return min(1, self.codec.rounds)

    def of(
        self, shapes: Shapes | None = None, dtype: DTypeLike = jnp.float32
    ) -> "Passing":
        """The same for these leaves, in the dtype of their sums."""
        codec, sends = self.codec.of(shapes, dtype), self.sends.of(shapes, dtype)
        return Passing(codec, self.passes, sends)

    def leaves(self, x: jax.Array) -> Any:
        """As of the codec."""
        return self.codec.leaves(x)

    def size(self, n: int) -> int:
        """4 or 8 bytes an element."""
        return self.sends.size(n)

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """All bits of x, or of zeros."""
        return self.sends.encode(self._sent(x), state)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """What was sent."""
        return self.sends.decode(payload, n)

    def bound(self, x: jax.Array) -> jax.Array:
        """Nothing is lost, or x."""
        return jnp.zeros_like(x) if self.passes else jnp.abs(x)

    def round_sizes(self, n: int) -> tuple[int, ...]:
        """All."""
        return (n,)

    def project(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...]
    ) -> jax.Array:
        """All, or zeros."""
        del state, sums
        return self._sent(joined(jax.tree.leaves(leaves)))

    def rebuild(self, state: Any, sums: tuple[jax.Array, ...], n: int) -> Any:
        """The sum."""
        del state, n
        return self.codec.leaves(sums[0])

    def settled(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...], own: jax.Array
    ) -> Any:
        """It keeps nothing."""
        del leaves, sums, own
        return state

    def _sent(self, x: jax.Array) -> jax.Array:
        return x if self.passes else jnp.zeros_like(x)


def passing(codec: Codec, *, passes: bool) -> Codec:
    """Returns what stands for `codec` when its residuals are read or written.

    Args:
      codec: any. Without feedback it has no residual, and what it stands for sends all.
      passes: whether a codec with feedback sends all it has, or keeps all.
    """
    if isinstance(codec, ErrorFeedback):
        return ErrorFeedback(Passing(codec.codec, passes))
    return Passing(codec, passes=True)
