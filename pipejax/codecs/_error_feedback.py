"""Error feedback: what a codec loses is not lost, but sent later.

With g the gradient, C the codec and e what it has lost so far:

  `Delta = C(e + g)`,  `e <- e + g - Delta`

Without it a codec that drops small elements drops them for ever; with it they add up
until they are large. Under a delay of K-1 steps e is what the message *before* this one
lost, when this one is sent: the delay does not change the rule. Of a message that is
skipped, for it is not finite, nothing is fed back: whoever sums restores the state.

References: Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847; Stich et al.
2018, https://arxiv.org/abs/1809.07599; of both shots, Tang et al. 2019,
https://arxiv.org/abs/1905.05957
"""

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from pipejax.vectors import Shapes, joined

from ._codec import Codec, Linear
from ._sparse import RandomK


class ErrorFeedbackState(NamedTuple):
    """What the codec has lost so far, and its own state.

    Attributes:
      residual: e, as the codec's `leaves`: a vector [n], or arrays in the shapes of the
        gradients; float32, or float64 where they are float64.
      codec: of the codec inside.
    """

    residual: Any
    codec: Any


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(Linear):
    """See `error_feedback`; linear if the codec inside is."""

    codec: Codec
    dtype: str = "float32"

    @property
    def multiple(self) -> int:
        """As of the codec inside."""
        return self.codec.multiple

    @property
    def needs_leaves(self) -> bool:
        """As of the codec inside."""
        return self.codec.needs_leaves

    @property
    def rounds(self) -> int:
        """As of the codec inside."""
        return self.codec.rounds

    def of(
        self, shapes: Shapes | None = None, dtype: DTypeLike = jnp.float32
    ) -> "ErrorFeedback":
        """The same for these leaves, its residual in the dtype of their sums."""
        return ErrorFeedback(self.codec.of(shapes, dtype), jnp.dtype(dtype).name)

    def leaves(self, x: jax.Array) -> Any:
        """As of the codec inside."""
        return self.codec.leaves(x)

    def init(self, n: int, seed: jax.Array) -> ErrorFeedbackState:
        """Nothing lost yet."""
        nothing = self.codec.leaves(jnp.zeros(n, self.dtype))
        return ErrorFeedbackState(nothing, self.codec.init(n, seed))

    def size(self, n: int) -> int:
        """As of the codec inside."""
        return self.codec.size(n)

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """The payload of what is due, and what that loses."""
        due = x.astype(self.dtype) + joined(jax.tree.leaves(state.residual))
        payload, inner = self.codec.encode(due, state.codec)
        # Of the payload that is sent, decoded as others decode it: XLA would compute
        # both anew here, and round elsewhere.
        payload = lax.optimization_barrier(payload)
        sent = lax.optimization_barrier(self.codec.decode(payload, x.size))
        lost = self.codec.leaves(due - sent.astype(self.dtype))
        return payload, ErrorFeedbackState(lost, inner)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """As the codec inside."""
        return self.codec.decode(payload, n)

    def bound(self, x: jax.Array) -> jax.Array:
        """As of the codec inside, of what is due: x is `g + e`."""
        return self.codec.bound(x)

    def round_sizes(self, n: int) -> tuple[int, ...]:
        """As of the codec inside."""
        return self._linear.round_sizes(n)

    def project(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...]
    ) -> jax.Array:
        """Of what is due."""
        due = optax.tree.add(leaves, state.residual)
        return self._linear.project(due, state.codec, sums)

    def rebuild(self, state: Any, sums: tuple[jax.Array, ...], n: int) -> Any:
        """As the codec inside."""
        return self._linear.rebuild(state.codec, sums, n)

    def settled(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...], own: jax.Array
    ) -> Any:
        """What this device's own part of the sum has lost."""
        due = optax.tree.add(leaves, state.residual)
        size = optax.tree.size(leaves)
        sent = self._linear.rebuild(state.codec, (*sums[:-1], own), size)
        inner = self._linear.settled(due, state.codec, sums, own)
        return ErrorFeedbackState(optax.tree.sub(due, sent), inner)

    @property
    def _linear(self) -> Linear:
        return cast(Linear, self.codec)


def error_feedback(codec: Codec) -> ErrorFeedback:
    """Keeps what `codec` loses, and adds it to the next vector.

      `Delta = C(e + g)`,  `e <- e + g - Delta`

    It differs from `codec` alone in that the sum of all that was sent follows the sum
    of all gradients: `sum Delta = sum g - e`. Every place where something is encoded
    has its own e: one float32 an element on each device for its own gradient, and one
    for each p-th element that it sums for others.

    Args:
      codec: any; one that is biased needs it.

    Raises:
      ValueError: for what is no codec, has feedback already, or scales up to stay
        unbiased, so that e would grow.
    """
    if isinstance(codec, ErrorFeedback) or not isinstance(codec, Codec):
        raise ValueError(
            "`codec` must be a codec without feedback, such as pj.codecs.sign(); got"
            f" {codec!r}."
        )
    if isinstance(codec, RandomK) and codec.scaled:
        raise ValueError(
            "`codec` must not scale up what it sends when what is lost is fed back, or"
            f" that would grow; got {codec}. Choose random_k(k, key, scaled=False)."
        )
    return ErrorFeedback(codec)
