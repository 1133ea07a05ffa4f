"""Stand-in codecs that send all of a vector or nothing, to move residuals.

They never encode gradients. `pipejax.collectives` runs an all-reduce with them to read
or write the residuals of its codecs. Under error feedback, a codec that sends
everything leaves a residual of zero, and a codec that sends nothing leaves everything
in the residual.
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
    """Stand-in for `codec` that sends every bit of a vector, or zeros.

    Algorithms cut and lay out vectors for the stand-in as they do for `codec`, so that
    its residuals are in the same places and have the same shapes.

    Attributes:
      codec: The codec whose layout is imitated.
      passes: Whether the whole vector is sent. If `False`, zeros are sent.
      sends: The codec that encodes the vector or the zeros.
    """

    codec: Codec
    passes: bool
    sends: AllBits = dataclasses.field(default_factory=AllBits)

    @property
    def multiple(self) -> int:
        """Returns the padding multiple of `codec`."""
        return self.codec.multiple

    @property
    def needs_leaves(self) -> bool:
        """Returns whether `codec` must be given whole leaves."""
        return self.codec.needs_leaves

    @property
    def rounds(self) -> int:
        """Returns 1 if `codec` has linear rounds, and 0 otherwise."""
        return min(1, self.codec.rounds)

    def of(
        self,
        shapes: Shapes | None = None,
        dtype: DTypeLike = jnp.float32,
        devices: int = 1,
    ) -> "Passing":
        """Adapts `codec` to these shapes, and sends vectors of `dtype`."""
        codec, sends = (
            self.codec.of(shapes, dtype, devices),
            self.sends.of(shapes, dtype, devices),
        )
        return Passing(codec, self.passes, sends)

    def leaves(self, x: jax.Array) -> Any:
        """Returns `x` in the form that the rounds of `codec` take."""
        return self.codec.leaves(x)

    def size(self, n: int) -> int:
        """Returns the payload's size: 4 bytes per float32 element, 8 per float64."""
        return self.sends.size(n)

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Returns every bit of `x`, or of zeros in its place."""
        return self.sends.encode(self._sent(x), state)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """Restores the vector that was sent, or the zeros."""
        return self.sends.decode(payload, n)

    def bound(self, x: jax.Array) -> jax.Array:
        """Returns zeros if everything is sent, and `|x|` if nothing is."""
        return jnp.zeros_like(x) if self.passes else jnp.abs(x)

    def round_sizes(self, n: int) -> tuple[int, ...]:
        """Returns one round of all `n` elements."""
        return (n,)

    def project(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...]
    ) -> jax.Array:
        """Returns all leaves as one vector, or zeros in its place."""
        del state, sums
        return self._sent(joined(jax.tree.leaves(leaves)))

    def rebuild(self, state: Any, sums: tuple[jax.Array, ...], n: int) -> Any:
        """Returns the sum of the only round, in the form that `leaves` returns."""
        del state, n
        return self.codec.leaves(sums[0])

    def settled(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...], own: jax.Array
    ) -> Any:
        """Returns `state` unchanged."""
        del leaves, sums, own
        return state

    def _sent(self, x: jax.Array) -> jax.Array:
        """Returns `x` if everything is sent, and zeros otherwise."""
        return x if self.passes else jnp.zeros_like(x)


def passing(codec: Codec, *, passes: bool) -> Codec:
    """Returns a stand-in for a codec, with which its residuals can be read or written.

    The stand-in keeps its residuals in the same places and shapes as `codec`:

    - To read the residuals, sum zeros with `passes=True`. Each place then sends its
      whole residual, and the result is the sum of all residuals.
    - To write residuals, sum the new values with `passes=False`. Each device then
      sends nothing and keeps the values as its residual.

    Args:
      codec: The codec to replace. If it has no error feedback, it has no residual, and
        the stand-in sends everything.
      passes: Whether the stand-in for a codec with error feedback sends its vector and
        residual completely, or keeps them completely.

    Returns:
      The stand-in. It sends 4 bytes per float32 element and 8 per float64 element.

    Examples:
      >>> from pipejax import codecs
      >>> fed_back = codecs.error_feedback(codecs.top_k(1))
      >>> state = codecs.ErrorFeedbackState(jnp.float32([2, 3]), ())
      >>> reader = passing(fed_back, passes=True)
      >>> payload, after = reader.encode(jnp.zeros(2), state)
      >>> print(reader.decode(payload, 2), after.residual)
      [2. 3.] [0. 0.]
    """
    if isinstance(codec, ErrorFeedback):
        return ErrorFeedback(Passing(codec.codec, passes))
    return Passing(codec, passes=True)
